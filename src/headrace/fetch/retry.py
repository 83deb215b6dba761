"""Which failures are worth another attempt, and after what wait: no I/O, no clock, no random numbers of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    ObjectChangedError,
    ObjectMissingError,
    StorageError,
)
from headrace.options import FetchOptions

_FINAL = (ObjectMissingError, AccessDeniedError, ObjectChangedError)
_PASSING_STATUS = (408, 425, 429)
_BAD_RESPONSES = 2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: before attempt n + 1 the wait is drawn between 0 and `backoff_s` · 2ⁿ⁻¹, at most `backoff_cap_s`.

    Why full jitter: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: of the kinds compared there
    it made the fewest calls, and readers that failed together do not come back together.
    """

    attempts: int
    backoff_s: float
    backoff_cap_s: float

    @classmethod
    def of(cls, options: FetchOptions) -> RetryPolicy:
        """The policy that `options` ask for."""
        return cls(options.attempts, options.backoff_s, options.backoff_cap_s)

    def requests_for(self, error: BaseException) -> int:
        """How many requests may be made in all when one has failed with `error`."""
        if isinstance(error, _FINAL) or not isinstance(error, (StorageError, OSError)):
            return 1
        if isinstance(error, BadResponseError):
            # A proxy's slip passes, a server that knows no ranges stays so: one more request tells them apart.
            return min(_BAD_RESPONSES, self.attempts)
        status = error.status if isinstance(error, StorageError) else None
        if status is not None and 400 <= status < 500 and status not in _PASSING_STATUS:
            return 1
        return self.attempts

    def wait_s(self, error: BaseException, attempt: int, left_s: float, rng: random.Random) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 1) failed with `error`; None: give up.

        Args:
            left_s: seconds left of the range's time; no attempt is begun after them.
        """
        if attempt >= self.requests_for(error):
            return None
        # The exponent is bounded because 2.0**1024 overflows.
        wait = rng.random() * min(self.backoff_cap_s, self.backoff_s * 2.0 ** min(attempt - 1, 64))
        return wait if wait < left_s else None
