"""Numbers in memory that workers share with the trainer: what each is at, and what it spends its time on."""

from __future__ import annotations

from headrace.memory import Segment

# Of each worker: the task it is at, the index of the sample in it, and nanoseconds that it has spent so far in making
# batches, in the collate function among that, and in beginning. Before them is a word for all: whether they are to end.
WORDS = 5
TASK, SAMPLE, MADE_NS, COLLATE_NS, START_NS = range(WORDS)


class WorkerProgress:
    """The trainer's end.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._segment = Segment.create(8 * (1 + WORDS * workers))
        self._words = self._segment.view.cast("q")

    def place_of(self, worker: int) -> tuple[tuple[str, int, int], list[int]]:
        """The message, and the descriptor with it, by which a worker is told where its words are."""
        return ("words", self._segment.size, _first_of(worker)), [self._segment.fd]

    def have_all_end(self) -> None:
        """Have workers end after what they are in the middle of."""
        self._words[0] = True

    def taken(self, worker: int) -> tuple[int, int]:
        """The task that a worker was at when it ended, and the index of the sample in it; -1: in none."""
        first = _first_of(worker)
        task, sample = self._words[first + TASK], self._words[first + SAMPLE]
        self._words[first + TASK], self._words[first + SAMPLE] = 0, -1
        return task, sample

    def spent_ns(self, what: int) -> int:
        """What all workers together have spent on something, such as `COLLATE_NS`."""
        return sum(self._words[_first_of(worker) + what] for worker in range(self._workers))

    def close(self) -> None:
        """Let go of the memory, which workers still have."""
        self._segment.close()


def _first_of(worker: int) -> int:
    return 1 + WORDS * worker
