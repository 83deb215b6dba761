"""One host of a reader: its running requests and hedges, its limits found by trying, and fair waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from headrace.errors import StorageError, ThrottledError
from headrace.fetch.meter import Meter
from headrace.fetch.range_request import RangeRequest
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
        self, everyone: Semaphore, bound: int, options: Fetch, meter: Meter, clock: Callable[[], float], *, is_far: bool
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
        self.level.turns.close()
        self.retry_budget.turns.close()
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


class WaitingLine:
    """Waiters in first-come order. Those that come `again` precede the others. A timer may wake them."""

    __slots__ = ("_again", "_new", "_timer", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._again: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def wait(self, wake: Callable[[], None], hand_on: Callable[[], None], *, again: bool = False) -> None:
        """Queue a waiter, call `wake` to grant what is free, and wait for a `grant`.

        `hand_on` is called if the waiter is cancelled after its grant.
        """
        future = asyncio.get_running_loop().create_future()
        line = self._again if again else self._new
        line.append(future)
        self.waiting += 1
        wake()
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                if future in line:
                    line.remove(future)
                    self.waiting -= 1
            else:
                hand_on()
            raise

    def grant(self) -> bool:
        for line in (self._again, self._new):
            while line:
                future = line.popleft()
                self.waiting -= 1
                if not future.done():
                    future.set_result(None)
                    return True
        return False

    def wake_in(self, seconds: float, wake: Callable[[], None]) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(seconds, wake)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Semaphore:
    """At most `limit` holders at once. `limit` may change and need not be an integer."""

    __slots__ = ("inside", "limit", "turns")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.inside = 0
        self.turns = WaitingLine()

    def try_enter(self) -> bool:
        if self.turns.waiting or self.inside + 1 > self.limit:
            return False
        self.inside += 1
        return True

    async def enter(self, *, again: bool = False) -> None:
        """Enter, waiting if needed. With `again`, precede waiters that enter for the first time."""
        if not self.try_enter():
            await self.turns.wait(self._wake, self.leave, again=again)

    def leave(self) -> None:
        self.inside -= 1
        if self.turns.waiting:
            self._wake()

    def _wake(self) -> None:
        while self.inside + 1 <= self.limit and self.turns.grant():
            self.inside += 1


_LESS = 0.7
_CUBE = 0.4  # constant of CUBIC (RFC 9438): how fast the rate grows
_SLOWEST = 5.0  # occasional refusals must not cost seconds
_WINDOW_S = 0.5
_UNUSED_WINDOWS = 10
_LEAST_WAIT_S = 0.001  # resolution of timers


class ConcurrencyLimit(Semaphore):
    """Concurrency limit of one host: at most `bound` requests at once, fewer under overload.

    A failure that indicates overload reduces the limit to 0.7 of the running requests, once for each round of requests.
    As many successes as the limit raise it by one, up to `bound`. A throttled host also gets a rate limit.
    """

    __slots__ = ("_clock", "_lowered_at", "_rate", "_unused", "bound", "lowest", "pace")

    def __init__(self, bound: int, clock: Callable[[], float]) -> None:
        super().__init__(bound)
        self.bound = self.lowest = bound
        self.pace: RateLimiter | None = None
        self._clock = clock
        self._lowered_at = -1.0
        self._rate = RateMeter(clock())
        self._unused = 0

    @property
    def is_free(self) -> bool:
        """True if nothing is limited below `bound`."""
        return self.pace is None and self.limit >= self.bound

    def try_enter(self) -> bool:
        if self.turns.waiting or self.inside + 1 > self.limit:
            return False
        if self.pace is not None and self.pace.take(self._clock()) > 0.0:
            return False
        self.inside += 1
        return True

    def succeeded(self, now: float) -> None:
        if self._rate.add(now) and self.pace is not None:
            # A rate limit far above the actual rate is removed.
            self._unused = self._unused + 1 if self.pace.at(now) > 2.0 * self._rate.of(now) else 0
            if self._unused >= _UNUSED_WINDOWS:
                self.pace = None
        if self.limit < self.bound:
            self.limit = min(float(self.bound), self.limit + 1.0 / self.limit)
            if self.turns.waiting:
                self._wake()

    def overloaded(self, began: float, *, throttled: bool) -> None:
        now = self._clock()
        if throttled:
            if self.pace is None:
                self.pace, self._unused = RateLimiter(self._rate.of(now), now), 0
            else:
                self.pace.lower(began, now, self._rate.of(now))
        if began >= self._lowered_at:
            self._lowered_at = now
            self.limit = max(1.0, _LESS * min(self.limit, self.inside))
            self.lowest = min(self.lowest, int(self.limit))

    def _wake(self) -> None:
        while self.turns.waiting and self.inside + 1 <= self.limit:
            wait_s = self.pace.take(self._clock()) if self.pace is not None else 0.0
            if wait_s > 0.0:
                self.turns.wake_in(wait_s, self._wake)
                return
            if self.turns.grant():
                self.inside += 1


class RateLimiter:
    """Rate limit of a host whose answers are too fast for a concurrency limit to slow requests.

    As CUBIC: 0.7 of the rate at the last refusal. The rate returns to that in some seconds, slowly near it, then grows
    faster and faster. It is reduced at most once in half a second.
    """

    __slots__ = ("_climb_s", "_filled_at", "_lowered_at", "_room", "_top")

    def __init__(self, used: float, now: float) -> None:
        self._room = 1.0
        self._filled_at = now
        self._set(used, used, now)

    def at(self, now: float) -> float:
        return max(_SLOWEST, self._top + _CUBE * (now - self._lowered_at - self._climb_s) ** 3)

    def lower(self, began: float, now: float, used: float) -> None:
        """Reduce the rate: a request started at `began` was refused while `used` per second passed."""
        if began < self._lowered_at or now - self._lowered_at < _WINDOW_S:
            return
        rate = min(self.at(now), used)
        # If the rate had not recovered, leave room for other clients (RFC 9438 §4.7, fast convergence).
        self._set(rate, rate if rate >= self._top else rate * (1.0 + _LESS) / 2.0, now)

    def take(self, now: float) -> float:
        """Take the next request's turn and return 0, or return the seconds to wait."""
        rate = self.at(now)
        self._room = min(max(1.0, rate / 50.0), self._room + (now - self._filled_at) * rate)
        self._filled_at = now
        if self._room >= 1.0 - 1e-9:
            self._room -= 1.0
            return 0.0
        return max(_LEAST_WAIT_S, (1.0 - self._room) / rate)

    def _set(self, rate: float, top: float, now: float) -> None:
        self._top = max(_SLOWEST, top)
        self._lowered_at = now
        self._climb_s: float = (max(0.0, self._top - max(_SLOWEST, rate * _LESS)) / _CUBE) ** (1.0 / 3.0)


class RateMeter:
    __slots__ = ("_before", "_count", "_since", "_since_before")

    def __init__(self, now: float) -> None:
        self._since = self._since_before = now
        self._count = self._before = 0

    def add(self, now: float) -> bool:
        """Count an event. Return True if it starts a new window."""
        begins = now - self._since >= _WINDOW_S
        if begins:
            self._before, self._since_before = self._count, self._since
            self._count, self._since = 0, now
        self._count += 1
        return begins

    def of(self, now: float) -> float:
        if self._before and now - self._since > 2.0 * _WINDOW_S:
            return self._before / max(_WINDOW_S, self._since - self._since_before)
        return (self._before + self._count) / max(_WINDOW_S / 10.0, now - self._since_before)


class RetryBudget:
    """Retry budget of a host: each retry takes one, successes and time give back.

    A host that usually answers never exhausts it. A host that is down gets two attempts a second instead of a storm,
    and the first successes release the waiting attempts.
    """

    FULL = 100.0
    PER_S = 2.0

    __slots__ = ("_clock", "_filled_at", "_left", "turns")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = self.FULL
        self._filled_at = clock()
        self.turns = WaitingLine()

    async def take(self) -> None:
        await self.turns.wait(self._wake, lambda: self.give(1.0))

    def give(self, share: float) -> None:
        """Give back `share` attempts, after a success or for an attempt that will not be made."""
        if self._left < self.FULL or self.turns.waiting:
            self._left = min(self.FULL, self._left + share)
            if self.turns.waiting:
                self._wake()

    def _wake(self) -> None:
        now = self._clock()
        self._left = min(self.FULL, self._left + (now - self._filled_at) * self.PER_S)
        self._filled_at = now
        while self._left >= 1.0 and self.turns.grant():
            self._left -= 1.0
        self.turns.close()
        if self.turns.waiting:  # timers have a resolution of 1 ms
            self.turns.wake_in(max(0.001, (1.0 - self._left) / self.PER_S), self._wake)
