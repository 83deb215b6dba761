"""Tracks decoded blocks, so that further samples of a block go to the same worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_KNOWN_MOST = 1024  # tracked blocks of a worker, more than it caches
_LATE = 4  # limit of the wait, in decoding times
_SLOWER = 1.25  # limit of the growth of the estimate by slow decodings


class OpenBlocks:
    """The blocks that one worker has, or will have, samples of."""

    def __init__(self) -> None:
        self._numbers: dict[int, bool] = {}  # by block: True if samples were sent
        self._asked: dict[int, tuple[int, int]] = {}  # by task: (blocks to decode, samples)
        self._heard_s = 0.0

    def missing(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks that the worker would have to decode."""
        return sum(number not in self._numbers for number in blocks)

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self._asked.values())

    def given(self, task: int, blocks: Sequence[int], samples: int, now_s: float) -> None:
        if not self._asked:
            self._heard_s = now_s
        self._asked[task] = sum(not self._numbers.get(number) for number in blocks), samples
        self._numbers.update(dict.fromkeys(blocks, True))
        while len(self._numbers) > _KNOWN_MOST:
            del self._numbers[next(iter(self._numbers))]

    def expect(self, blocks: Sequence[int]) -> None:
        """Record that a task with samples of these blocks waits for this worker."""
        for number in blocks:
            self._numbers.setdefault(number, False)

    def answered(self, task: int, now_s: float) -> int:
        """Record a reply. Returns the number of blocks that the worker had to decode for the task."""
        self._heard_s = now_s
        opened, _ = self._asked.pop(task, (0, 0))
        return opened

    def late_s(self, patience_s: float) -> float:
        """Return the time after which the worker is late, at `patience_s` per block in work."""
        opens, _ = next(iter(self._asked.values()), (0, 0))
        return self._heard_s + patience_s * max(1, opens)


class Opening:
    """Estimates the time to decode a block, without its samples, from replies."""

    def __init__(self) -> None:
        self._sample_s: float | None = None
        self._open_s = 0.0  # 0: not known yet
        self._first: tuple[float, int, int] | None = None  # a reply from before the time per sample was known

    def learn(self, seconds: float, samples: int, opened: int) -> None:
        """Add a reply: seconds for some samples, and the number of blocks decoded for them."""
        if opened and self._sample_s is None:
            self._first = seconds, samples, opened
        elif opened:
            each = max(0.0, seconds - samples * (self._sample_s or 0.0)) / opened
            self._open_s = min(each, _SLOWER * self._open_s) if self._open_s else each
        else:
            each = seconds / max(1, samples)
            self._sample_s = each if self._sample_s is None else 0.9 * self._sample_s + 0.1 * each
            if self._first is not None:
                first, self._first = self._first, None
                self.learn(*first)

    def better_until_s(
        self, blocks: Sequence[int], best: OpenBlocks, workers: Iterable[OpenBlocks], before: int, now_s: float
    ) -> float | None:
        """Return until when samples wait for a worker that has more of their blocks. None: no wait.

        They wait if that worker reaches them before another one could decode the blocks. A worker that is silent much
        longer is assumed to be held up.

        Args:
            best: The worker with most of these blocks, among those that could start now.
            before: Number of waiting samples that come first.
        """
        if not self._open_s or not self._sample_s or not (missing := best.missing(blocks)):
            return None
        found = min(workers, key=lambda one: one.missing(blocks), default=best)
        saved_s = (missing - found.missing(blocks)) * self._open_s
        until_s = found.late_s(_LATE * self._open_s)
        if (found.samples + before) * self._sample_s >= saved_s or until_s <= now_s:
            return None
        found.expect(blocks)
        return until_s
