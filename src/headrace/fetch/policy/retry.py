"""Which failures are worth another attempt, after what wait, and how many further attempts a host gets in all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    ObjectChangedError,
    ObjectMissingError,
    StorageError,
)
from headrace.fetch.policy.semaphore import WaitingLine
from headrace.options import FetchOptions

_FINAL = (ObjectMissingError, AccessDeniedError, ObjectChangedError)
_PASSING_STATUS = (408, 425, 429)
_BAD_RESPONSES = 2
_LONGEST_ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: before attempt n + 1 the wait is drawn between 0 and `backoff_s` · 2ⁿ⁻¹, at most `backoff_cap_s`.

    Why full jitter: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: of the kinds compared there
    it made the fewest calls, and readers that failed together do not come back together. What the store asks for
    (Retry-After, up to a minute) comes on top for the same reason: it tells all readers the same time.
    """

    attempts: int
    backoff_s: float
    backoff_cap_s: float

    @classmethod
    def of(cls, options: FetchOptions) -> RetryPolicy:
        """The policy that `options` ask for."""
        return cls(options.attempts, options.backoff_s, options.backoff_cap_s)

    def requests_for(self, error: BaseException) -> int:
        """How many requests may be made when all have failed with such an `error`."""
        if isinstance(error, ObjectChangedError) and not error.is_certain:
            return min(_BAD_RESPONSES, self.attempts)
        if isinstance(error, _FINAL) or not isinstance(error, (StorageError, OSError)):
            return 1
        if isinstance(error, BadResponseError):
            # A proxy's slip passes, a server that knows no ranges stays so: one more request tells them apart.
            return min(_BAD_RESPONSES, self.attempts)
        status = getattr(error, "status", None)
        if status is not None and 400 <= status < 500 and status not in _PASSING_STATUS:
            return 1
        return self.attempts

    def wait_s(self, error: BaseException, attempt: int, alike: int, left_s: float, rng: random.Random) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 1) failed with `error`; None: give up.

        Args:
            alike: how many attempts in a row have failed in this way.
            left_s: seconds left of the range's time; no attempt is begun after them.
        """
        if attempt >= self.attempts or alike >= self.requests_for(error):
            return None
        # The exponent is bounded because 2.0**1024 overflows.
        wait = rng.random() * min(self.backoff_cap_s, self.backoff_s * 2.0 ** min(attempt - 1, 64))
        asked = getattr(error, "retry_after_s", None)
        if asked is not None:
            wait += min(max(asked, 0.0), _LONGEST_ASKED_S)
        return wait if wait < left_s else None


class RetryBudget:
    """How many further attempts a host gets: each takes one, successes and time give back.

    While a host answers as a rule, nobody notices. When it fails for everybody, attempts wait here for their turn: a
    store that is down gets two a second instead of a storm, and the first that succeed let the others go.
    """

    FULL = 100.0
    PER_S = 2.0

    __slots__ = ("_clock", "_filled_at", "_left", "_timer", "_turns")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = self.FULL
        self._filled_at = clock()
        self._turns = WaitingLine()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Wait until one more attempt may be made."""
        await self._turns.wait(self._wake, lambda: self.give(1.0))

    def give(self, share: float) -> None:
        """A request has succeeded (or will not be made)."""
        if self._left < self.FULL or self._turns.waiting:
            self._left = min(self.FULL, self._left + share)
            if self._turns.waiting:
                self._wake()

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        now = self._clock()
        self._left = min(self.FULL, self._left + (now - self._filled_at) * self.PER_S)
        self._filled_at = now
        while self._left >= 1.0 and self._turns.grant():
            self._left -= 1.0
        self.close()
        if self._turns.waiting:
            wait_s = max(0.001, (1.0 - self._left) / self.PER_S)  # timers are good for 1 ms
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)
