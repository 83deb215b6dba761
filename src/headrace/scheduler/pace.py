"""How many samples go into one task, where it is not known how many of them a batch needs, or it needs one."""

from __future__ import annotations

_WORTH_S = 20e-3  # of work: what a task costs besides is a small part of it
_WORTH_AT_ONCE_S = 5e-3  # the same, where somebody waits for the first of them
_WORTH_BYTES = 2**20
_WORTH_AT_ONCE_BYTES = 2**18
_LARGE_BYTES = 2**16  # a sample of more is not copied out of its place, which it has for itself


class Pace:
    """Grows from one sample, so that the first one comes as soon as it can, to as many as are worth a task.

    Args:
        most: samples in a task.
        is_awaited: whether what comes of them goes to the trainer as it is, and not on to further tasks.
    """

    def __init__(self, most: int, *, is_awaited: bool = False) -> None:
        self._most, self._grown, self._begun = most, 1, 0
        self._worth_s = _WORTH_AT_ONCE_S if is_awaited else _WORTH_S
        self._worth_bytes = _WORTH_AT_ONCE_BYTES if is_awaited else _WORTH_BYTES
        self._sample_s = self._sample_bytes = 0.0

    @property
    def size(self) -> int:
        """How many samples the next task takes at most."""
        if self._sample_bytes > _LARGE_BYTES:
            return 1
        size = self._grown
        if self._sample_s:
            size = min(size, int(self._worth_s / self._sample_s))
        if self._sample_bytes:
            size = min(size, int(self._worth_bytes / self._sample_bytes))
        return max(1, size)

    def begin(self) -> None:
        """A task is begun: 1, 1, 2, 4, ... are those from the first on."""
        self._begun += 1
        if self._begun > 1:
            self._grown = min(self._most, 2 * self._grown)

    def learn(self, count: int, seconds: float, nbytes: int) -> None:
        """A worker has made so many samples in so many seconds, which are so many bytes.

        What is more than before counts at once, what is less by and by.
        """
        self._sample_s = max(seconds / count, (self._sample_s + seconds / count) / 2)
        self._sample_bytes = max(nbytes / count, (self._sample_bytes + nbytes / count) / 2)
