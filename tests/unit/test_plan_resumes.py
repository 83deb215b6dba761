"""Resumes: after any run, and from its state in any other, every sample of the epoch comes once.

HEADRACE_RESUMES is the number of resumes, 500 by default.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders.orders import order_of

from headrace.errors import OptionError
from headrace.order import Cursor, Order, ShardOrder, Steps, Windows
from headrace.order.cursor import pack_ranges, unpack_ranges

RESUMES = int(os.environ.get("HEADRACE_RESUMES", "500"))
WORLDS = (1, 1, 2, 3, 5, 8, 12, 96, 100, 256, 1000, 1024)
STATE_BYTES_MOST = 40_000


def saved(cursor: Cursor) -> str:
    return json.dumps([cursor.position, pack_ranges(cursor.holes)])


def loaded(text: str) -> Cursor:
    position, holes = json.loads(text)
    return Cursor(position, unpack_ranges(holes))


class Data:
    """A random data set and a random order of it; which samples have come."""

    def __init__(self, chance: random.Random) -> None:
        count = chance.choice([1, 3, 20, 200])
        most = chance.choice([1, 50, 400])
        kind = chance.choice(["uneven", "zipf", "same"])
        self.sizes = np.array(
            [{"uneven": chance.randint(0, most), "zipf": 4 * most // (k + 1), "same": most}[kind] for k in range(count)]
        )
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.by = chance.choice(["none", "shards", "within", "windows", "windows", "windows", "global"])
        self.windows = Windows.of(chance.choice([1, 64, 2048, 16_384]), chance.choice([1, 8, 64]))
        self.key = chance.randrange(1000), chance.randrange(10)
        self.came = np.zeros(int(self.sizes.sum()), int)

    def order(self) -> Order:
        return order_of(self.sizes.tolist(), self.by, self.key, self.windows)

    def samples(self, order: Order, positions: np.ndarray) -> np.ndarray:
        shards, rows = order.locate(positions.ravel())
        return (self.starts[shards] + rows).reshape(positions.shape)

    def told(self) -> dict[str, Any]:
        return {"sizes": self.sizes.tolist(), "by": self.by, "windows": self.windows, "key": self.key}


def steps_of(order: Order, begin: Cursor, size: int, world: int, rank: int = 0) -> Steps:
    return Steps(begin, order.count, size, "short", rank, world, order.lanes)


def test_every_sample_comes_once_and_steps_are_the_same_when_runs_are_resumed_elsewhere() -> None:
    chance = random.Random(11)
    resumes = 0
    while resumes < RESUMES // 2:
        data = Data(chance)
        if not len(data.came):
            continue
        sizes = [chance.choice([1, 7, 64, 100, 1024, 4096])]
        if chance.random() < 0.3:  # another global batch after each resume
            sizes += [chance.choice([2, 48, 1000]), chance.choice([1, 333])]
        uninterrupted = full_steps(data, sizes[0])
        cursor, number = Cursor.at(), 0
        while cursor.position < data.order().count:
            order, size = data.order(), chance.choice(sizes)
            world = chance.choice([w for w in WORLDS if w <= size])
            try:
                steps = steps_of(order, cursor, size, world)
            except OptionError:  # fewer samples are left than ranks
                world = 1
                steps = steps_of(order, cursor, size, world)
            taken = chance.randint(1, steps.steps)
            full, *last = [data.samples(order, step) for step in steps_of_all_ranks(order, cursor, size, world, taken)]
            for step in (full, *last):
                data.came[step] += 1
            if len(sizes) == 1:
                assert np.array_equal(full, uninterrupted[number : number + len(full)]), data.told()
                number += len(full)
            cursor = loaded(saved(steps.after(taken)))
            assert len(saved(cursor)) < 100
            resumes += 1
        assert (data.came == 1).all(), data.told()


@pytest.mark.slow
def test_every_sample_comes_once_when_ranks_were_not_equally_far() -> None:
    chance = random.Random(12)
    resumes = longest = 0
    while resumes < RESUMES // 2:
        data = Data(chance)
        count = len(data.came)
        cursor = Cursor.at()
        while count - cursor.position + cursor.hole_count > 0:
            order = data.order()
            left = count - cursor.position + cursor.hole_count
            world = chance.choice([w for w in WORLDS if w <= left])
            size = min(left, world * chance.choice([1, 4, 32]))
            ranks = [steps_of(order, cursor, size, world, rank) for rank in range(world)]
            reached = chance.randint(1, ranks[0].steps)
            delivered = [unequal(chance, steps, reached) for steps in ranks]
            for positions in delivered:
                data.came[data.samples(order, positions)] += 1
            cursor = loaded(saved(cursor.without(np.concatenate(delivered))))
            longest = max(longest, len(saved(cursor)))
            assert cursor.hole_count <= left
            resumes += 1
        assert (data.came == 1).all(), data.told()
    assert longest <= STATE_BYTES_MOST


@pytest.mark.slow
def test_a_state_stays_small_when_a_thousand_ranks_were_not_equally_far() -> None:
    chance = random.Random(13)
    order = ShardOrder(np.full(1000, 1000), "windows", (1, 2), Windows.of(131_072, 512))
    ranks = [steps_of(order, Cursor.at(), 32 * 1024, 1024, rank) for rank in range(1024)]
    delivered = np.concatenate([unequal(chance, steps, 20) for steps in ranks])
    cursor = Cursor.at().without(delivered)
    assert cursor.hole_count + len(delivered) == cursor.position
    assert len(saved(cursor)) <= STATE_BYTES_MOST


def full_steps(data: Data, size: int) -> np.ndarray:
    order = data.order()
    steps = steps_of(order, Cursor.at(), size, 1)
    return data.samples(order, steps.positions(0, steps.full * size)).reshape(steps.full, size)


def steps_of_all_ranks(order: Order, begin: Cursor, size: int, world: int, taken: int) -> Iterator[np.ndarray]:
    """The first steps, of the batches of all ranks: [steps, samples] of full ones, then each last one."""
    ranks = [steps_of(order, begin, size, world, rank) for rank in range(world)]
    full = min(taken, ranks[0].full)
    yield np.hstack([rank.positions(0, full * rank.batch).reshape(full, rank.batch) for rank in ranks])
    starts = [rank.full * rank.batch for rank in ranks]
    for number in range(taken - full):
        stops = [start + rank.sizes()[2][number] for start, rank in zip(starts, ranks, strict=True)]
        yield np.concatenate([rank.positions(*part) for rank, *part in zip(ranks, starts, stops, strict=True)])
        starts = stops


def unequal(chance: random.Random, steps: Steps, reached: int) -> np.ndarray:
    size, full, more = steps.sizes()
    all_of_them = size * min(reached, full) + sum(more[: max(0, reached - full)])
    count = all_of_them if chance.random() < 0.3 else chance.randint(max(0, all_of_them - 2 * size), all_of_them)
    mine = steps.positions(0, all_of_them)
    jumbled = mine[max(0, count - size) : count + size].copy()
    np.random.default_rng(chance.randrange(2**32)).shuffle(jumbled)
    return np.concatenate([mine[: max(0, count - size)], jumbled])[:count]
