"""The order of shards whose samples are counted during reading."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from headrace._util import check
from headrace.order.permutation import draw, permutation
from headrace.types import Ints


class Rounds:
    """Shards read in order, for a number of rounds.

    Args:
        seed: Seed of the order in each round. None: the given order.
        times: Number of rounds. None: endless.

    Attributes:
        count: Number of this rank's shards in a round.
    """

    def __init__(
        self,
        urls: Sequence[str],
        seed: int | None,
        epoch: int,
        times: int | None,
        rank: int,
        world: int,
        *,
        may_be_empty: bool = False,
    ) -> None:
        if world > len(urls) and not may_be_empty:
            remedy = "make an index, then ranks share shards (headrace index URL…)"
            raise check.too_few(f"{len(urls)} shards", world, remedy)
        self._urls, self._seed, self._epoch, self._times = urls, seed, epoch, times
        self._rank, self._world = rank, world
        self.count = (len(urls) - rank - 1) // world + 1
        self._round: tuple[int, Ints] = -1, np.zeros(0, np.int64)

    def from_turn(self, turn: int, stop: tuple[int, int] | None = None) -> Iterator[tuple[int, str]]:
        """Yield (turn, URL) of shards from a turn on, up to a (turn, row) from `at`."""
        turns: Iterable[int] = itertools.count(turn)
        if self._times is not None:
            turns = range(turn, self._times * self.count)
        if stop is not None:
            turns = itertools.takewhile(lambda turn: (turn, 0) < stop, turns)
        return ((k, self._urls[self.shard(k)]) for k in turns)

    def at(self, position: int, sizes: Ints) -> tuple[int, int]:
        """Return (turn, row) of the sample at a position of the epoch, for these shard sizes."""
        total = int(sizes.sum())
        if not total:
            return 0, 0
        number, position = divmod(position, total)
        turns = range(number * self.count, (number + 1) * self.count)
        ends = np.cumsum([sizes[self.shard(turn)] for turn in turns])
        k = int(ends.searchsorted(position, side="right"))
        return turns[k], position - int(ends[k - 1] if k else 0)

    def shard(self, turn: int) -> int:
        number, k = divmod(turn, self.count)
        if self._round[0] != number:
            shards = np.arange(len(self._urls))
            if self._seed is not None:
                shards = permutation(shards, len(shards), draw("shards", self._seed, self._epoch, number))
            self._round = number, shards[self._rank :: self._world]
        return int(self._round[1][k])
