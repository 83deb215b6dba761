"""How much a host is asked for at once and per second: as much as it takes, found by trying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.fetch.policy.semaphore import Semaphore

_LESS = 0.7
_CUBE = 0.4  # of CUBIC (RFC 9438): how fast the pace climbs
_SLOWEST = 5.0  # single refusals, as stores strew them in, must not cost seconds
_WINDOW_S = 0.5
_UNUSED_WINDOWS = 10
_LEAST_WAIT_S = 0.001  # what timers are good for


class ConcurrencyLimit(Semaphore):
    """One host's gate: at most `bound` requests at once, fewer and at a pace when it is too much for the host.

    A failure that shows overload takes the level to 0.7 of what is under way, once for each round of requests; as many
    successes as the level is high raise it by one, up to the bound.

    Args:
        bound: requests at once while all is well.
        clock: monotonic seconds.
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
        """Whether the host gets all that is wanted."""
        return self.pace is None and self.limit >= self.bound

    def try_enter(self) -> bool:
        """See `Semaphore.try_enter`."""
        if self._turns.waiting or self.inside + 1 > self.limit:
            return False
        if self.pace is not None and self.pace.take(self._clock()) > 0.0:
            return False
        self.inside += 1
        return True

    def succeeded(self, now: float) -> None:
        """A request was answered in full."""
        if self._rate.add(now) and self.pace is not None:
            # A pace that is far above what is being asked for holds nobody back any more.
            self._unused = self._unused + 1 if self.pace.at(now) > 2.0 * self._rate.of(now) else 0
            if self._unused >= _UNUSED_WINDOWS:
                self.pace = None
        if self.limit < self.bound:
            self.limit = min(float(self.bound), self.limit + 1.0 / self.limit)
            if self._turns.waiting:
                self._wake()

    def overloaded(self, began: float, *, throttled: bool) -> None:
        """A request that began at `began` took too long, or the store asked for fewer."""
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
        """End the timer."""
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
    """Requests per second, for a host that answers too fast to be held back by the number of requests at once.

    As CUBIC: 0.7 of what got through when the host asked for fewer; back to that in some seconds, slowly while near
    it, and from there on faster and faster. At most once in half a second less.
    """

    __slots__ = ("_climb_s", "_filled_at", "_lowered_at", "_room", "_top")

    def __init__(self, used: float, now: float) -> None:
        self._room = 1.0
        self._filled_at = now
        self._set(used, used, now)

    def at(self, now: float) -> float:
        """Requests per second now."""
        return max(_SLOWEST, self._top + _CUBE * (now - self._lowered_at - self._climb_s) ** 3)

    def lower(self, began: float, now: float, used: float) -> None:
        """A request that began at `began` was too many, while `used` per second got through."""
        if began < self._lowered_at or now - self._lowered_at < _WINDOW_S:
            return
        rate = min(self.at(now), used)
        # Who did not get back to where it was leaves room for others (RFC 9438 §4.7, fast convergence).
        self._set(rate, rate if rate >= self._top else rate * (1.0 + _LESS) / 2.0, now)

    def take(self, now: float) -> float:
        """Seconds to wait for the next request; 0: it is taken."""
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
    """Events per second over the last half second to second."""

    __slots__ = ("_before", "_count", "_since", "_since_before")

    def __init__(self, now: float) -> None:
        self._since = self._since_before = now
        self._count = self._before = 0

    def add(self, now: float) -> bool:
        """One more; True where a new window begins with it."""
        begins = now - self._since >= _WINDOW_S
        if begins:
            self._before, self._since_before = self._count, self._since
            self._count, self._since = 0, now
        self._count += 1
        return begins

    def of(self, now: float) -> float:
        """Events per second; after a pause those before it."""
        if self._before and now - self._since > 2.0 * _WINDOW_S:
            return self._before / max(_WINDOW_S, self._since - self._since_before)
        return (self._before + self._count) / max(_WINDOW_S / 10.0, now - self._since_before)
