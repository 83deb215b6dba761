"""Which failures are retried, after which wait, and how many retries a host gets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import AccessDeniedError, BadResponseError, ObjectChangedError, ObjectMissingError, StorageError
from headrace.fetch.policy.limits import WaitingLine
from headrace.options import Fetch

_FINAL = (ObjectMissingError, AccessDeniedError, ObjectChangedError)
_PASSING_STATUS = (408, 425, 429)
_BAD_RESPONSES = 2
_LONGEST_ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: wait n is random, at most `backoff_s` · 2ⁿ⁻¹ and `backoff_cap_s`.

    Of the kinds compared in Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015, full jitter made
    the fewest calls. Readers that failed together do not retry together. So Retry-After (at most a minute), which is
    the same for all readers, is added to the random wait.
    """

    attempts: int
    backoff_s: float
    backoff_cap_s: float

    @classmethod
    def of(cls, options: Fetch) -> RetryPolicy:
        return cls(options.attempts, options.backoff_s, options.backoff_cap_s)

    def requests_for(self, error: BaseException) -> int:
        if isinstance(error, ObjectChangedError) and not error.is_certain:
            return min(_BAD_RESPONSES, self.attempts)
        if isinstance(error, _FINAL) or not isinstance(error, (StorageError, OSError)):
            return 1
        if isinstance(error, BadResponseError):
            # A proxy's mistake is temporary, missing support of ranges is not: one more request distinguishes them.
            return min(_BAD_RESPONSES, self.attempts)
        status = getattr(error, "status", None)
        if status is not None and 400 <= status < 500 and status not in _PASSING_STATUS:
            return 1
        return self.attempts

    def wait_s(self, error: BaseException, attempt: int, alike: int, left_s: float, rng: random.Random) -> float | None:
        """Return the wait in seconds after attempt `attempt` (from 1) failed; None: give up.

        Args:
            alike: Number of consecutive attempts that failed in this way.
            left_s: Seconds left of the range's time limit. No attempt starts after them.
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
    """Retry budget of a host: each retry takes one, successes and time give back.

    A host that usually answers never exhausts it. A host that is down gets two attempts a second instead of a storm,
    and the first successes release the waiting attempts.
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
        await self._turns.wait(self._wake, lambda: self.give(1.0))

    def give(self, share: float) -> None:
        """Give back `share` attempts, after a success or for an attempt that will not be made."""
        if self._left < self.FULL or self._turns.waiting:
            self._left = min(self.FULL, self._left + share)
            if self._turns.waiting:
                self._wake()

    def close(self) -> None:
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
            wait_s = max(0.001, (1.0 - self._left) / self.PER_S)  # timers have a resolution of 1 ms
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)
