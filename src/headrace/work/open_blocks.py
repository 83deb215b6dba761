"""Which worker has opened which blocks, so that the other samples of these go to it, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_KNOWN_MOST = 1024  # blocks of a worker: it keeps fewer
_LATE = 4  # times as long as opening takes
_SLOWER = 1.25  # by so much at most an opening that took longer than the quickest one counts for more


class OpenBlocks:
    """The blocks that one worker was given samples of, or is to be."""

    def __init__(self) -> None:
        self._numbers: dict[int, bool] = {}  # whether it was given some
        self._asked: dict[
            int, tuple[int, int]
        ] = {}  # of each task that it has, the blocks it opens for it, and samples
        self._heard_s = 0.0

    def missing(self, blocks: Sequence[int]) -> int:
        """How many of these it would have to open."""
        return sum(number not in self._numbers for number in blocks)

    @property
    def samples(self) -> int:
        """How many samples it has to make."""
        return sum(samples for _, samples in self._asked.values())

    def given(self, task: int, blocks: Sequence[int], samples: int, now_s: float) -> None:
        """It was given a task with so many samples, which are of these."""
        if not self._asked:
            self._heard_s = now_s
        self._asked[task] = sum(not self._numbers.get(number) for number in blocks), samples
        self._numbers.update(dict.fromkeys(blocks, True))
        while len(self._numbers) > _KNOWN_MOST:
            del self._numbers[next(iter(self._numbers))]

    def expect(self, blocks: Sequence[int]) -> None:
        """A task with samples of these waits for it: what else is of them should, too."""
        for number in blocks:
            self._numbers.setdefault(number, False)

    def answered(self, task: int, now_s: float) -> int:
        """It has answered; how many blocks it had to open for this task."""
        self._heard_s = now_s
        opened, _ = self._asked.pop(task, (0, 0))
        return opened

    def late_s(self, patience_s: float) -> float:
        """When it has been so long, for each block that it opens now, without an answer."""
        opens, _ = next(iter(self._asked.values()), (0, 0))
        return self._heard_s + patience_s * max(1, opens)


class Opening:
    """How long it takes to open a block, beside what its samples take: learned from what workers answer."""

    def __init__(self) -> None:
        self._sample_s: float | None = None
        self._open_s = 0.0  # not known yet
        self._first: tuple[float, int, int] | None = None  # answer, before it was known what samples take by themselves

    def learn(self, seconds: float, samples: int, opened: int) -> None:
        """A worker took so long to make some samples, for which it had to open so many blocks."""
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
        """Until when samples of these blocks wait for a worker that has more of them; None: not at all.

        They wait where such a worker comes to them before another one has opened the blocks, too. Who does not answer
        for much longer than that takes is held up by something else.

        Args:
            best: of the workers that could take them now, the one that has most of these blocks.
            before: how many samples wait already that come first.
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
