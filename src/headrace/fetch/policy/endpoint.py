"""One host of a reader: its limits, its latency, and the running requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from headrace.errors import StorageError, ThrottledError
from headrace.fetch.meter import Meter
from headrace.fetch.policy.limits import ConcurrencyLimit, Semaphore
from headrace.fetch.policy.range_request import RangeRequest
from headrace.fetch.policy.retry import RetryBudget
from headrace.fetch.stores.addresses import panic_in
from headrace.options import Fetch
from headrace.types import Answer, Store

ReadFailure = StorageError | OSError

_WON = "the second request was answered first"
_NEVER = float("inf")


class Endpoint:
    """One host: requests to its stores with their hedges, and the limits learned from results.

    Args:
        is_far: False for a local store, which gets no hedges.
        everyone: Limit of all requests of the reader.
        bound: Concurrency limit of a healthy host.
    """

    def __init__(
        self,
        everyone: Semaphore,
        bound: int,
        options: Fetch,
        meter: Meter,
        clock: Callable[[], float],
        *,
        is_far: bool,
    ) -> None:
        self.level = ConcurrencyLimit(bound, clock)
        self.retry_budget = RetryBudget(clock)
        self.hedges = Hedges(options.hedge_share) if options.hedge_share and is_far else None
        self.succeeded_at = clock()
        self._everyone, self._meter, self._clock = everyone, meter, clock
        self._hedged: dict[HedgedRequest, None] = {}
        self._seconds: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """True if the endpoint may be discarded without losing state."""
        return not self.level.inside and self.level.is_free

    def try_enter(self) -> bool:
        if not self._everyone.try_enter():
            return False
        if not self.level.try_enter():
            self._everyone.leave()
            return False
        return True

    async def enter(self, *, again: bool = False) -> None:
        await self.level.enter(again=again)
        try:
            await self._everyone.enter(again=again)
        except asyncio.CancelledError:
            self.level.leave()
            raise

    def leave(self) -> None:
        self.level.leave()
        self._everyone.leave()

    def succeeded(self, *, again: bool) -> None:
        self.succeeded_at = now = self._clock()
        self.level.succeeded(now)
        self.retry_budget.give(1.0 if again else 0.1)

    def failed(self, error: ReadFailure, began: float) -> ReadFailure:
        throttled = isinstance(error, ThrottledError)
        if throttled or isinstance(error, TimeoutError):
            self.level.overloaded(began, throttled=throttled)
            meter = self._meter
            meter.throttled += throttled
            meter.level = int(self.level.limit)
            meter.lowest_level = min(meter.lowest_level or meter.level, meter.level)
        return error

    async def ask(self, store: Store, path: str, request: RangeRequest, began: float) -> Answer:
        """Return the answer for the missing bytes of `request`, from the request or a faster hedge."""
        if self.hedges is None:
            return await _get(store, path, request)
        hedged = HedgedRequest(store, path, request, began)
        self._hedged[hedged] = None
        try:
            answer = await _get(store, path, request)
        except asyncio.CancelledError:
            if request.stopped_by != _WON or request.settle() is None:
                raise
            answer = hedged.take()
            self._meter.hedges_won += 1
        except (StorageError, OSError) as error:
            if hedged.second is None or not hedged.is_asked_again:
                raise  # the hedge may be waiting for this request's slot
            hedged.first_failed = True
            await asyncio.wait([hedged.second])
            if hedged.answer is None:
                if isinstance(hedged.failure, StorageError) and hedged.failure.retry_after_s:
                    raise hedged.failure from error  # the one of the two with Retry-After
                raise
            self.failed(error, began)
            answer = hedged.take()
            self._meter.hedges_won += 1
        finally:
            self._hedged.pop(hedged, None)
            if hedged.second is not None:
                hedged.second.cancel()
                hedged.second = hedged.failure = None
                await hedged.dispose()
        self.hedges.learn(self._clock() - began)
        return answer

    def due(self, began: float) -> float:
        return _NEVER if self.hedges is None else began + self.hedges.delay_s

    def hedge(self, now: float) -> float:
        """Start the hedges that are due. Return the time of the next check, or infinity."""
        assert self.hedges is not None
        late = []
        again = _NEVER
        for hedged in self._hedged:
            again = self.due(hedged.began)
            if again > now:
                break
            late.append(hedged)
            again = now + self.hedges.delay_s
        for hedged in late:
            if not self.level.is_free or not self.hedges.take():
                break
            del self._hedged[hedged]
            hedged.second = asyncio.get_running_loop().create_task(self._ask_again(hedged))
            self._seconds.add(hedged.second)
            hedged.second.add_done_callback(self._seconds.discard)
        return again

    async def aclose(self) -> None:
        self.level.close()
        self.retry_budget.close()
        for second in self._seconds:
            second.cancel()
        await asyncio.gather(*self._seconds, return_exceptions=True)

    async def _ask_again(self, hedged: HedgedRequest) -> None:
        request, meter = hedged.request, self._meter
        if not self.try_enter():
            await self.enter(again=True)
        hedged.is_asked_again = True
        began = self._clock()
        meter.begin(began)
        meter.hedges += 1
        try:
            hedged.answer = await _get(hedged.store, hedged.path, request)
        except (StorageError, OSError) as error:
            hedged.failure = self.failed(error, began)
            return
        except BaseException as error:
            panic = panic_in(error, request.url, hedged.store)
            if panic is None:
                raise
            hedged.failure = self.failed(panic, began)
            return
        finally:
            meter.end(self._clock())
            self.leave()
        if hedged.second is None:
            await hedged.dispose()
        elif not hedged.first_failed:
            request.interrupt(_WON)


class HedgedRequest:
    __slots__ = ("answer", "began", "failure", "first_failed", "is_asked_again", "path", "request", "second", "store")

    def __init__(self, store: Store, path: str, request: RangeRequest, began: float) -> None:
        self.store, self.path, self.request, self.began = store, path, request, began
        self.second: asyncio.Task[None] | None = None
        self.answer: Answer | None = None
        self.failure: ReadFailure | None = None
        self.first_failed = self.is_asked_again = False

    def take(self) -> Answer:
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer

    async def dispose(self) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            await close(answer)


def _get(store: Store, path: str, request: RangeRequest) -> Awaitable[Answer]:
    start, stop = request.asked_start, request.asked_stop
    if request.rest is not None:
        # `WebStore.go_on`: other stores support ranges, or are no servers
        go_on: Callable[..., Awaitable[Answer]] | None = getattr(store, "go_on", None)
        if go_on is not None:
            return go_on(path, start, stop, if_match=request.if_match, rest=request.rest)
    return store.get(path, start, stop, if_match=request.if_match)


async def close(answer: Answer) -> None:
    aclose = getattr(answer.chunks, "aclose", None)
    if aclose is not None:
        await aclose()


_KEPT = 256
_LEAST_KNOWN = 20
_EACH = 32
_LEAST_S = 0.001
_BURST = 5.0


class Hedges:
    """First-byte latencies of one host, and its budget of hedges: `share` per request.

    The 95th percentile is that of the last 256 latencies, sorted after every 32: 0.3 µs per request and exact. It
    adapts to a changed host within some hundred requests. (A streaming estimate is as slow in Python, and needs a step
    size that suits both 1 ms and 1 s.) `delay_s` is infinite while too little is known.
    """

    __slots__ = ("_share", "_since", "_times", "_tokens", "delay_s")

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = 1.0
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._since = 0
        self.delay_s = float("inf")

    def learn(self, seconds: float) -> None:
        """Record a first-byte latency; after a hedge that was faster, a lower bound."""
        times = self._times
        times.append(seconds)
        self._tokens = min(_BURST, self._tokens + self._share)
        self._since += 1
        if self._since >= _EACH or len(times) == _LEAST_KNOWN:
            self._since = 0
            if len(times) >= _LEAST_KNOWN:
                self.delay_s = max(_LEAST_S, sorted(times)[len(times) * 95 // 100])

    def take(self) -> bool:
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
