"""States of shards without an index: what one rank and several can make of each other's."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from builders.ranks import ran, samples, whole, world
from end_to_end.state import sources
from end_to_end.state.sources import GZ, TAR, Places, Seen

import headrace as hr

COUNTS = [20, 3, 31, 6]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_one_rank_goes_on_when_several_have_made_an_index(places: Places, shuffled: bool) -> None:
    written = places.write(COUNTS)

    def data() -> Any:
        shards = sources.source(TAR, written)
        return (shards.shuffle() if shuffled else shards).map(Seen())

    def epochs(world_size: int, count: int, state: Any = None) -> list[Any]:
        with ExitStack() as stack:
            ranks = world(stack, world_size, data, state, global_batch_size=6)
            return [batch for _ in range(count) for batch in whole(ranks.run())]

    expected = epochs(3, 2)
    steps, states = ran(3, data, global_batch_size=6, most=4)
    got = whole(steps) + epochs(1, 2, states[1])
    assert got == expected
    assert sorted(number for batch in got for _, number, *_ in batch) == sorted([*range(sum(COUNTS))] * 2)


def test_several_ranks_refuse_when_one_has_read_without_an_index_and_say_why(places: Places) -> None:
    written = places.write(COUNTS)
    data = lambda: sources.source(TAR, written).shuffle().map(Seen())
    with ExitStack() as stack:
        ranks = world(stack, 1, data, batch_size=6)
        ranks.run(2)
        (state,) = ranks.states()
    with ExitStack() as stack:
        (loader,) = world(stack, 2, data, batch_size=6).loaders[:1]
        with pytest.raises(
            hr.StateMismatchError, match=r"without an index, and 2 ranks.*set_epoch.*index=.build"
        ) as caught:
            loader.load_state_dict(state)
        assert caught.value.field == "index"
        loader.set_epoch(1)
        assert len(next(iter(loader))["n"]) == 6
    indexed = lambda: hr.stream(written.urls[TAR], index="build").shuffle().map(Seen())
    with ExitStack() as stack:
        ranks = world(stack, 1, indexed, global_batch_size=6)
        got = ranks.run(2)
        (state,) = ranks.states()
    with ExitStack() as stack:
        got += world(stack, 2, indexed, state, global_batch_size=6).run()
        assert set(samples(got).values()) == {1}
        assert sum(samples(got).values()) == sum(COUNTS)


def test_other_data_are_told_as_such_when_a_state_is_of_them(places: Places) -> None:
    """And no index is kept that was made in vain."""
    written, other = places.write(COUNTS), places.write([5, 5])
    with ExitStack() as stack:
        ranks = world(stack, 2, lambda: sources.source(TAR, written), global_batch_size=6)
        state = ranks.states()[0]
        alone = world(stack, 1, lambda: sources.source(TAR, other), batch_size=6).loaders[0]
        with pytest.raises(hr.StateMismatchError, match="the data are others"):
            alone.load_state_dict(state)
        with pytest.raises(TypeError, match="counted while they are read"):
            len(alone)


@pytest.mark.parametrize("kind", [TAR, GZ])
def test_state_of_shards_of_ones_own_is_refused_by_other_ranks_and_says_why(places: Places, kind: str) -> None:
    written = places.write(COUNTS)
    data = lambda: sources.source(kind, written).map(Seen()).epoch(samples=60)
    with ExitStack() as stack:
        ranks = world(stack, 2, data, batch_size=4)
        ranks.run(2)
        state = ranks.states()[1]
        for size in (1, 3):
            loader = world(stack, size, data, batch_size=4).loaders[0]
            with pytest.raises(hr.StateMismatchError, match=r"shards of their own.*with 2 of them"):
                loader.load_state_dict(state)


@pytest.mark.slow
def test_ranks_share_compressed_shards_when_a_filter_stands_before_the_epoch(places: Places) -> None:
    written = places.write([40, 20, 31, 26])
    data = lambda: sources.source(GZ, written).map(Seen()).filter(sources.most).epoch(samples=60)
    got, states = ran(2, data, batch_size=4, most=3)
    got += ran(2, data, states, batch_size=4)[0]
    assert sum(samples(got).values()) == 60
    assert {len(batch) for step in got[:-1] for batch in step} == {4}
