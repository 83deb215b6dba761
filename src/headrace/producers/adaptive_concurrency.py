"""The number of concurrent reads, found by trial."""

from __future__ import annotations

_WORTH = 4.0 / 3.0


class AdaptiveConcurrency:
    """A number of concurrent reads, doubled as long as that adds a third of throughput.

    Remote storage supports hundreds of concurrent reads. Near storage, or a saturated machine, gets no faster by them,
    and each costs a connection and memory. A round lasts for as many responses as the level. It counts if more reads
    were wanted during a good part of this round and of the one before.
    """

    def __init__(self, first: int, most: int) -> None:
        self.level = min(first, most)
        self._most = most
        self._rate = 0.0
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Start a round. Earlier results are kept."""
        self._count = self._full = 0
        self._since, self._was_full = now, False

    def answered(self, now: float, *, is_full: bool) -> bool:
        """Count a response. True if the level has grown. `is_full`: the level limited the reads."""
        self._count += 1
        self._full += is_full
        if self._count < self.level or self.level >= self._most:
            return False
        rate, was_full = self._count / max(1e-9, now - self._since), self._was_full
        is_full = self._full * 4 >= self._count
        self.begin(now)
        self._was_full = is_full
        counts = is_full and (was_full or not self._rate)
        if not counts:
            return False
        if rate < _WORTH * self._rate:
            self._most = self.level
            return False
        self._rate = rate
        self.level = min(self._most, 2 * self.level)
        return True
