"""Size of tasks whose number of samples no batch size determines."""

from __future__ import annotations

_WORTH_S = 20e-3  # work per task: large against the overhead of a task
_WORTH_AT_ONCE_S = 5e-3  # if the trainer waits for the first sample
_WORTH_BYTES = 2**20
_WORTH_AT_ONCE_BYTES = 2**18
_LARGE_BYTES = 2**16  # larger samples have a slab alone, from which they are not copied


class Pace:
    """Grows the task size from one sample, for a fast start, to as many as are worth a task.

    Args:
        is_awaited: True if results go directly to the trainer and not to further tasks.
    """

    def __init__(self, most: int, *, is_awaited: bool = False) -> None:
        self._most, self._grown, self._begun = most, 1, 0
        self._is_awaited = is_awaited
        self._worth_s = _WORTH_AT_ONCE_S if is_awaited else _WORTH_S
        self._worth_bytes = _WORTH_AT_ONCE_BYTES if is_awaited else _WORTH_BYTES
        self._sample_s = self._sample_bytes = 0.0

    @property
    def size(self) -> int:
        if self._sample_bytes > _LARGE_BYTES or (self._is_awaited and not self._sample_s):
            return 1
        size = self._grown
        if self._sample_s:
            size = min(size, int(self._worth_s / self._sample_s))
        if self._sample_bytes:
            size = min(size, int(self._worth_bytes / self._sample_bytes))
        return max(1, size)

    def begin(self) -> None:
        """Count a task: sizes grow as 1, 1, 2, 4, ..."""
        self._begun += 1
        if self._begun > 1:
            self._grown = min(self._most, 2 * self._grown)

    def learn(self, count: int, seconds: float, nbytes: int) -> None:
        """Update the averages by a finished task. Increases count at once, decreases gradually."""
        self._sample_s = max(seconds / count, (self._sample_s + seconds / count) / 2)
        self._sample_bytes = max(nbytes / count, (self._sample_bytes + nbytes / count) / 2)
