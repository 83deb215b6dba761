"""How many reads at once are worth while, found by trying."""

from __future__ import annotations

_WORTH = 4.0 / 3.0


class AdaptiveConcurrency:
    """A number of reads at once: twice as many, as long as that brings a third more per second.

    Storage that is far away takes hundreds of reads at once; storage that is near, or a machine that has no more to
    give, gets no faster by them, and each costs a connection and memory. A round is as many answers as the level is
    high; it counts where more were wanted for a good part of it and of the one before.

    Args:
        first: where it begins.
        most: where it ends.

    Attributes:
        level: how many reads at once.
    """

    def __init__(self, first: int, most: int) -> None:
        self.level = min(first, most)
        self._most = most
        self._rate = 0.0
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A round begins: what was learned stays."""
        self._count = self._full = 0
        self._since, self._was_full = now, False

    def answered(self, now: float, *, is_full: bool) -> bool:
        """One answer more; True where the level has grown.

        Args:
            is_full: whether as many reads were under way as the level allows, and more were wanted.
        """
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
