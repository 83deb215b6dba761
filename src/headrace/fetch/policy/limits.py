"""Concurrency and rate limits of a host, found by trying, and fair waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class WaitingLine:
    """Waiters in first-come order. Those that come `again` precede the others."""

    __slots__ = ("_again", "_new", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
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


class Semaphore:
    """At most `limit` holders at once. `limit` may change and need not be an integer."""

    __slots__ = ("_turns", "inside", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.inside = 0
        self._turns = WaitingLine()

    def try_enter(self) -> bool:
        if self._turns.waiting or self.inside + 1 > self.limit:
            return False
        self.inside += 1
        return True

    async def enter(self, *, again: bool = False) -> None:
        """Enter, waiting if needed. With `again`, precede waiters that enter for the first time."""
        if not self.try_enter():
            await self._turns.wait(self._wake, self.leave, again=again)

    def leave(self) -> None:
        self.inside -= 1
        if self._turns.waiting:
            self._wake()

    def _wake(self) -> None:
        while self.inside + 1 <= self.limit and self._turns.grant():
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

    __slots__ = ("_clock", "_lowered_at", "_rate", "_timer", "_unused", "bound", "lowest", "pace")

    def __init__(self, bound: int, clock: Callable[[], float]) -> None:
        super().__init__(bound)
        self.bound = self.lowest = bound
        self.pace: RateLimiter | None = None
        self._clock = clock
        self._lowered_at = -1.0
        self._rate = RateMeter(clock())
        self._unused = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_free(self) -> bool:
        """True if nothing is limited below `bound`."""
        return self.pace is None and self.limit >= self.bound

    def try_enter(self) -> bool:
        if self._turns.waiting or self.inside + 1 > self.limit:
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
            if self._turns.waiting:
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

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        while self._turns.waiting and self.inside + 1 <= self.limit:
            wait_s = self.pace.take(self._clock()) if self.pace is not None else 0.0
            if wait_s > 0.0:
                self.close()
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)
                return
            if self._turns.grant():
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
