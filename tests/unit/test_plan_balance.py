"""Samples dealt to ranks by their work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.order import Cursor, Steps
from headrace.order.balance import dealt


@given(work=st.lists(st.floats(0, 1e9), min_size=1, max_size=60), world=st.integers(1, 9))
def test_each_rank_gets_as_many_as_it_is_to(work: list[float], world: int) -> None:
    cuts = [rank * len(work) // world for rank in range(world + 1)]
    sizes = np.diff(cuts).tolist()
    ranks = dealt(np.array(work), sizes)
    assert np.bincount(ranks, minlength=world).tolist() == sizes
    assert np.array_equal(ranks, dealt(np.array(work), sizes))


@pytest.mark.parametrize("world", [2, 8, 64])
@pytest.mark.parametrize("power", [1, 2])
def test_packed_documents_are_dealt_evenly(world: int, power: int) -> None:
    """Sequences of documents, 16 for each rank: what lognormal documents in sequences of 4,096 tokens are."""
    random = np.random.default_rng(0)
    for _ in range(5):
        work = np.zeros(16 * world)
        for sequence in range(len(work)):
            room = 4096
            while room:
                length = min(room, int(random.lognormal(np.log(600), 1)) + 1)
                work[sequence] += float(length) ** power
                room -= length
        loads = np.bincount(dealt(work, [16] * world), work, world)
        in_turn = work.reshape(world, 16).sum(axis=1)
        assert loads.max() <= 1.02 * loads.mean()
        assert loads.max() <= in_turn.max()


def test_what_is_larger_than_all_others_is_alone_with_the_least() -> None:
    assert dealt(np.array([1.0, 100.0, 1.0, 2.0]), [2, 2]).tolist() in ([0, 1, 1, 0], [1, 0, 0, 1])


@given(world=st.integers(1, 5), size=st.integers(5, 12), count=st.integers(5, 80), done=st.integers(0, 5))
def test_steps_are_the_same_and_each_rank_has_its_part(world: int, size: int, count: int, done: int) -> None:
    def deal(positions: np.ndarray, sizes: list[int]) -> np.ndarray:
        return dealt((positions * 7919 % 13).astype(float), sizes)

    begin = Cursor.at(min(done, count - world))
    plain = [Steps(begin, count, size, rank=rank, world=world) for rank in range(world)]
    even = [Steps(begin, count, size, rank=rank, world=world, deal=deal) for rank in range(world)]
    at = [0] * world
    for step in range(plain[0].steps):
        sizes = [steps.samples(step + 1) - steps.samples(step) for steps in plain]
        mine = [steps.positions(k, k + n).tolist() for steps, k, n in zip(even, at, sizes, strict=True)]
        whole = [steps.positions(k, k + n).tolist() for steps, k, n in zip(plain, at, sizes, strict=True)]
        assert [len(one) for one in mine] == sizes
        assert sorted(itertools.chain(*mine)) == sorted(itertools.chain(*whole))
        assert all(one == sorted(one) for one in mine)
        at = [k + n for k, n in zip(at, sizes, strict=True)]
    assert [steps.positions(0, n).tolist() for steps, n in zip(even, at, strict=True)] == [
        [p for k in range(0, n, 3) for p in steps.positions(k, min(n, k + 3)).tolist()]
        for steps, n in zip(even, at, strict=True)
    ]
