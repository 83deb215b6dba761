"""Plan of samples of shards that are read from start to end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Scanner
from headrace.readers.decompress import Unpacks
from headrace.types import Ints, Ranges


@dataclass(frozen=True, slots=True)
class ShuffleWindow:
    """Consecutive samples that are permuted. Their number depends on the data only.

    Attributes:
        samples, nbytes: A window ends with the sample that reaches either.
        order: Maps (number of samples, window number) to a permutation.
    """

    samples: int
    nbytes: int
    order: Callable[[int, int], Ints]


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """A point from which reading shards repeats the same samples.

    Attributes:
        shard: Number of the shard in the order of the plan.
        row: Number of its samples before the point.
        window: Number of the window that starts there.
        failures: Numbers of samples after the point that shards failed at. A failure ends a window, and the numbers of
            later samples depend on the missing rest of that shard.
    """

    shard: int = 0
    row: int = 0
    window: int = 0
    failures: Sequence[int] = ()

    def described(self) -> list[object]:
        token: list[object] = [self.shard, self.row, self.window]
        return [*token, list(self.failures)] if self.failures else token


class Expected(NamedTuple):
    """Known version and number of samples (None: not known) of a shard that must be scanned."""

    version: Version
    samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReading:
    """How shards are read.

    Attributes:
        unpacks: Makes a decompressor for a shard. None: not compressed.
        expected: Returns properties from an index or a listing. None: there is neither.
        range_bytes: Bytes per request.
    """

    reader: Reads
    scanner: Callable[[str], Scanner]
    unpacks: Callable[[str], Unpacks | None]
    expected: Callable[[int], Awaitable[Expected]] | None
    range_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The samples of shards to emit.

    Attributes:
        shards: Numbers and addresses in the order of the plan, starting with the shard of `begin`.
        window: Shuffle by windows.
        buffer: Shuffle by a buffer instead.
        take: Maximum number of samples, skipped ones included.
        in_round: Number of shards per round. Samples are not exchanged between rounds.
        is_endless: True if rounds repeat without end.
        begin: Resume point.
        done: Samples after that point to skip.
        stop: (number of a shard, row) of the first sample not emitted. None: no such limit.
    """

    shards: Iterable[tuple[int, str]]
    window: ShuffleWindow | None
    buffer: ShuffleBuffer | None
    take: int | None
    in_round: int
    is_endless: bool
    begin: ResumeToken
    done: Ranges
    stop: tuple[int, int] | None = None


class ShuffleBuffer:
    """Determines the sample that leaves a full buffer when another one comes.

    Samples are represented by numbers: waiting ones are 0, 1, …, and new ones follow.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._random = np.random.Generator(np.random.Philox(key=key))
        self.waiting = 0

    def slot(self) -> int | None:
        """Return the slot of the sample replaced by a new one. None if there is room."""
        if self.waiting < self._size:
            self.waiting += 1
            return None
        return int(self._random.integers(0, self._size))

    def come(self, count: int) -> tuple[Ints, Ints]:
        """Add `count` samples: (numbers of those that leave, in order; of those that stay)."""
        stay = list(range(self.waiting))
        room = max(0, min(count, self._size - self.waiting))
        stay += range(self.waiting, self.waiting + room)
        leave = []
        drawn = self._random.integers(0, self._size, count - room)
        for k, number in enumerate(drawn.tolist(), self.waiting + room):
            leave.append(stay[number])
            stay[number] = k
        self.waiting = len(stay)
        return np.array(leave, np.int64), np.array(stay, np.int64)

    def end(self) -> Ints:
        """Empty the buffer and return the numbers of its samples in order of leaving."""
        waiting, self.waiting = self.waiting, 0
        return self._random.permutation(waiting)
