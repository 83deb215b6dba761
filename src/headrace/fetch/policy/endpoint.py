"""One host as a reader knows it: how much it takes, how fast it is, and what is being asked of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.errors import StorageError, ThrottledError
from headrace.fetch.meter import Meter
from headrace.fetch.panics import panic_in
from headrace.fetch.policy.limits import ConcurrencyLimit
from headrace.fetch.policy.range_request import RangeRequest
from headrace.fetch.policy.retry import RetryBudget
from headrace.fetch.policy.semaphore import Semaphore
from headrace.fetch.rest import Rest
from headrace.options import FetchOptions
from headrace.types import Answer, Store

ReadFailure = StorageError | OSError

_WON = "the second request was answered first"
_NEVER = float("inf")


class GoesOn(Protocol):
    """`WebStore.go_on`: as `Store.get`, where a server that only gives objects as a whole goes on with the last."""

    async def __call__(
        self, path: str, start: int | None, stop: int | None, *, if_match: str | None, rest: Rest
    ) -> Answer: ...


class Endpoint:
    """One host: requests to the stores that lie there, with their second ones, and what their ends teach.

    Args:
        is_far: whether it is another machine: a disk is not made faster by being asked twice.
        everyone: the gate of all the reader's requests.
        bound: requests at once while all is well.
        options: how many second requests may be made.
        meter: where to count.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        everyone: Semaphore,
        bound: int,
        options: FetchOptions,
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
        """Whether nothing is lost when it is forgotten."""
        return not self.level.inside and self.level.is_free

    def try_enter(self) -> bool:
        """Be among the requests under way, if that needs no waiting."""
        if not self._everyone.try_enter():
            return False
        if not self.level.try_enter():
            self._everyone.leave()
            return False
        return True

    async def enter(self, *, again: bool = False) -> None:
        """Be among the requests under way."""
        await self.level.enter(again=again)
        try:
            await self._everyone.enter(again=again)
        except asyncio.CancelledError:
            self.level.leave()
            raise

    def leave(self) -> None:
        """A request has ended."""
        self.level.leave()
        self._everyone.leave()

    def succeeded(self, *, again: bool) -> None:
        """A request was answered in full, at once or after attempts that failed."""
        self.succeeded_at = now = self._clock()
        self.level.succeeded(now)
        self.retry_budget.give(1.0 if again else 0.1)

    def failed(self, error: ReadFailure, began: float) -> ReadFailure:
        """A request that began at `began` failed; gives the error back."""
        throttled = isinstance(error, ThrottledError)
        if throttled or isinstance(error, TimeoutError):
            self.level.overloaded(began, throttled=throttled)
            meter = self._meter
            meter.throttled += throttled
            meter.level = int(self.level.limit)
            meter.lowest_level = min(meter.lowest_level or meter.level, meter.level)
        return error

    async def ask(self, store: Store, path: str, request: RangeRequest, began: float) -> Answer:
        """The answer for what is missing of `request`, or for a second request that was faster."""
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
                raise  # the second request may be waiting for our own place
            hedged.first_failed = True
            await asyncio.wait([hedged.second])
            if hedged.answer is None:
                if isinstance(hedged.failure, StorageError) and hedged.failure.retry_after_s:
                    raise hedged.failure from error  # of the two the one that says when to come back
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
        """When a request that began at `began` is late."""
        return _NEVER if self.hedges is None else began + self.hedges.delay_s

    def hedge(self, now: float) -> float:
        """Make the second requests that are due; gives when to look again."""
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
        """Wait until the second requests that lost are gone, and end the timers."""
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
    """A request whose first byte has not come yet, and its second one."""

    __slots__ = ("answer", "began", "failure", "first_failed", "is_asked_again", "path", "request", "second", "store")

    def __init__(self, store: Store, path: str, request: RangeRequest, began: float) -> None:
        self.store, self.path, self.request, self.began = store, path, request, began
        self.second: asyncio.Task[None] | None = None
        self.answer: Answer | None = None
        self.failure: ReadFailure | None = None
        self.first_failed = self.is_asked_again = False

    def take(self) -> Answer:
        """The second request's answer, which is the one that counts."""
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer

    async def dispose(self) -> None:
        """Nobody wants the second request's answer."""
        answer, self.answer = self.answer, None
        if answer is not None:
            await close(answer)


def _get(store: Store, path: str, request: RangeRequest) -> Awaitable[Answer]:
    start, stop = request.asked_start, request.asked_stop
    if request.rest is not None:
        go_on: GoesOn | None = getattr(store, "go_on", None)  # others know ranges, or are no servers
        if go_on is not None:
            return go_on(path, start, stop, if_match=request.if_match, rest=request.rest)
    return store.get(path, start, stop, if_match=request.if_match)


async def close(answer: Answer) -> None:
    """Read no more of it."""
    aclose = getattr(answer.chunks, "aclose", None)
    if aclose is not None:
        await aclose()


_KEPT = 256
_LEAST_KNOWN = 20
_EACH = 32
_LEAST_S = 0.001
_BURST = 5.0


class Hedges:
    """One host's times to the first byte, and its right to second requests.

    The 95th percentile is that of the last 256 times, sorted anew after every 32: 0.3 µs a request, exact, and it
    follows a host that changes within some hundred requests. (A streaming estimate costs as much in Python, and needs
    a step size that fits both 1 ms and 1 s.)

    Args:
        share: second requests per request; above 0.

    Attributes:
        delay_s: how late a first byte must be; infinite while too little is known.
    """

    __slots__ = ("_share", "_since", "_times", "_tokens", "delay_s")

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = 1.0
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._since = 0
        self.delay_s = float("inf")

    def learn(self, seconds: float) -> None:
        """A first byte took so long; or more, where a second request was faster."""
        times = self._times
        times.append(seconds)
        self._tokens = min(_BURST, self._tokens + self._share)
        self._since += 1
        if self._since >= _EACH or len(times) == _LEAST_KNOWN:
            self._since = 0
            if len(times) >= _LEAST_KNOWN:
                self.delay_s = max(_LEAST_S, sorted(times)[len(times) * 95 // 100])

    def take(self) -> bool:
        """Whether one more second request may be made; then it counts."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
