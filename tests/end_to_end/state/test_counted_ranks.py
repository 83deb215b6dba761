"""Ranks that share an epoch of uncounted samples make equally many steps, also after a resume."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from builders.numbers import Counting
from builders.ranks import ran, samples, world
from end_to_end.state import sources
from end_to_end.state.sources import INDEXED, MAP, TAR, Places, Seen, Written

import headrace as hr
from headrace.state.state import merge_states


@pytest.fixture(scope="module")
def written(places: Places) -> Written:
    return places.write([40, 3, 60, 5])


def filtered(written: Written) -> Any:
    return sources.source(INDEXED, written).shuffle("window", window=20).map(Seen()).filter(sources.most)


def lengths(steps: Any) -> list[int]:
    return [sum(map(len, step)) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("count", [48, 49, 50, 53, 60])
@pytest.mark.parametrize("kind", [INDEXED, TAR])
def test_ranks_make_as_many_steps_when_samples_are_counted_as_they_come(
    written: Written, kind: str, count: int
) -> None:
    data = lambda: sources.source(kind, written).map(Seen()).filter(sources.most).epoch(samples=count)
    if kind == TAR:
        data = lambda: sources.source(kind, written).map(Seen()).epoch(samples=count)
    with ExitStack() as stack:
        ranks = world(stack, 3, data, batch_size=4)
        assert sum(samples(ranks.run()).values()) == count
        ranks.run(2)
        states = ranks.states()
    assert sum(samples(ran(3, data, states, batch_size=4)[0]).values()) == count - 24


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_ranks_go_on_from_their_own_states_when_a_filter_stands_before_an_epoch(
    written: Written, in_order: bool
) -> None:
    data = lambda: filtered(written).epoch(samples=60)
    options: dict[str, Any] = {"batch_size": 4, "in_order": in_order}
    with ExitStack() as stack:
        ranks = world(stack, 3, data, **options)
        expected = [ranks.run() for _ in range(2)]
    first, states = ran(3, data, **options, most=2)
    with ExitStack() as stack:
        ranks = world(stack, 3, data, states, **options)
        rest, then = ranks.run(), ranks.run()
    if in_order:
        assert [first + rest, then] == expected
    else:
        assert [samples(first) + samples(rest), samples(then)] == [samples(steps) for steps in expected]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (2, 4)])
def test_merged_states_give_an_epoch_its_samples_when_a_filter_stands_before_it(
    written: Written, before: int, after: int
) -> None:
    data = lambda: filtered(written).epoch(samples=60)
    steps, states = ran(before, data, global_batch_size=12, most=2)
    got = samples(steps)
    got += samples(ran(after, data, merge_states(states), global_batch_size=12)[0])
    assert sum(got.values()) == 60
    assert max(got.values()) == 1


ENDS_SOONER: dict[str, Callable[[Written], Any]] = {
    "take after a filter": lambda written: filtered(written).take(80),
    "filter after an epoch": lambda written: (
        sources.source(MAP, written).epoch(samples=40).map(Seen()).filter(sources.most)
    ),
    "take after both": lambda written: ENDS_SOONER["filter after an epoch"](written).take(10),
}


@pytest.mark.parametrize("case", ENDS_SOONER)
def test_ranks_refuse_what_may_end_sooner_on_one_of_them(written: Written, case: str) -> None:
    with ExitStack() as stack:
        ranks = world(stack, 2, lambda: ENDS_SOONER[case](written), batch_size=4)
        with pytest.raises(hr.OptionError, match="different numbers of batches"):
            ranks.run()


@pytest.mark.parametrize("size", [4, 5])
def test_ranks_share_what_is_taken_of_an_epoch_of_samples_without_numbers(written: Written, size: int) -> None:
    with ExitStack() as stack:
        data = lambda: sources.source(TAR, written).map(Seen()).epoch(samples=60).take(10)
        assert sum(lengths(world(stack, 2, data, global_batch_size=size).run())) == 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEXED, TAR])
def test_ranks_make_as_many_steps_when_some_are_skipped(written: Written, kind: str) -> None:
    data = lambda: sources.source(kind, written).map(Seen()).epoch(samples=17)
    if kind == INDEXED:
        data = lambda: filtered(written).epoch(samples=17)
    with ExitStack() as stack:
        ranks = world(stack, 2, data, batch_size=4)
        expected = ranks.run()
        for loader in ranks.loaders:
            loader.set_epoch(0)
            loader.skip(1)
        assert ranks.run() == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "size", "after"), [(10, 4, 3), (12, 5, 2), (6, 20, 1)])
def test_ranks_make_as_many_steps_when_the_rest_is_cut_otherwise(
    written: Written, before: int, size: int, after: int
) -> None:
    data = lambda: filtered(written).epoch(samples=63)
    steps, states = ran(2, data, global_batch_size=before, most=3)
    got = lengths(steps)
    steps, states = ran(after, data, merge_states(states), global_batch_size=size, most=2)
    got += lengths(steps)
    assert got == [before] * 3 + [size] * 2
    with ExitStack() as stack:  # each from its own
        rest = lengths(world(stack, after, data, states, global_batch_size=size).run())
    assert sum(got) + sum(rest) == 63
    assert rest[:-2] == [size] * (len(rest) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEXED, TAR])
def test_ranks_that_go_on_from_their_own_states_take_up_another_batch_size_at_once(written: Written, kind: str) -> None:
    data = lambda: sources.source(kind, written).map(Seen()).epoch(samples=64)
    if kind == INDEXED:
        data = lambda: filtered(written).epoch(samples=64)
    got, states = ran(2, data, batch_size=4, most=2)
    for _ in range(2):
        steps, states = ran(2, data, states, batch_size=6, most=1)
        got += steps
    got += ran(2, data, states, batch_size=3)[0]
    assert lengths(got) == [8, 8, 12, 12, 6, 6, 6, 6]
    assert max(samples(got).values()) == 1


@pytest.mark.slow
def test_global_batch_stays_behind_a_filter_when_only_the_world_is_another(written: Written) -> None:
    data = lambda: filtered(written).epoch(samples=60)
    _, states = ran(2, data, batch_size=4, most=2)
    assert lengths(ran(1, data, merge_states(states), batch_size=4)[0]) == [8] * 5 + [4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # three workers for three batches
@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("filters", [False, True])
def test_ranks_make_as_many_steps_when_the_short_batch_of_one_came_first(
    written: Written, filters: bool, size: int
) -> None:
    go_on = threading.Event()

    def data() -> Any:
        samples = sources.source(TAR if not filters else INDEXED, written).map(Seen())
        return (samples.filter(sources.most) if filters else samples).epoch(samples=20)

    def late(batch: list[Any]) -> list[Any]:
        assert len(batch) < 4 or go_on.wait(30)
        return batch

    received, states = [], []
    for rank in range(2):
        if rank:
            go_on.set()
        options: dict[str, Any] = {"num_workers": 3, "workers": "thread", "collate_fn": list if rank else late}
        with hr.DataLoader(data(), batch_size=4, rank=rank, world_size=2, in_order=bool(rank), **options) as loader:
            received.append(len(next(iter(loader))))
            states.append({**loader.state_dict()})
            go_on.set()
    assert received == [2, 4]
    with ExitStack() as stack:
        if size == 4:
            assert sorted(lengths(world(stack, 2, data, states, batch_size=size, in_order=False).run())) == [6, 8]
            return
        with pytest.raises(hr.StateMismatchError) as caught:
            world(stack, 2, data, states, batch_size=size, in_order=False)
        assert ("merge_states" in str(caught.value)) == filters


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_of_an_ended_epoch_is_of_the_batches_that_it_ended_with(written: Written, ranks: int) -> None:
    data = lambda: filtered(written).epoch(samples=60)
    with ExitStack() as stack:
        some = world(stack, ranks, data, batch_size=4)
        some.run(2)
        states = some.states()
    with ExitStack() as stack:
        some = world(stack, ranks, data, states, batch_size=6)
        some.run()
        states = some.states()
        expected = some.run()
    assert {(state["step"], state["batch_size"]) for state in states} == {(6 * ranks, 6)}
    assert ran(ranks, data, states, batch_size=6)[0] == expected
    with ExitStack() as stack:
        merged = merge_states(states)
        assert lengths(world(stack, 1, data, merged, batch_size=6).run())[0] == 6 * ranks


def test_merged_states_skip_what_ranks_were_to_skip(written: Written) -> None:
    data = lambda: filtered(written).epoch(samples=30)
    with ExitStack() as stack:
        ranks = world(stack, 2, data, batch_size=4)
        for loader in ranks.loaders:
            loader.skip(3)
        states = ranks.states()
    assert lengths(ran(2, data, merge_states(states), batch_size=4)[0]) == [6]


def test_states_of_samples_without_numbers_are_not_merged(written: Written) -> None:
    with ExitStack() as stack:
        ranks = world(stack, 2, lambda: sources.source(TAR, written).map(Seen()).epoch(samples=100), batch_size=4)
        for loader in ranks.loaders:
            loader.skip(3)
        with pytest.raises(hr.StateMismatchError, match="each rank's own"):
            merge_states(ranks.states())


@pytest.mark.parametrize("size", [4, 5])
def test_iterables_of_ranks_go_on_behind_an_epoch_when_the_next_has_other_batches(size: int) -> None:
    with ExitStack() as stack:
        endless = lambda: Counting(ranks_by="shard_info").epoch(samples=60)
        ranks = [hr.DataLoader(endless(), global_batch_size=4, rank=r, world_size=2) for r in (0, 1)]
        states = []
        for loader in map(stack.enter_context, ranks):
            assert sum(map(len, loader)) == 30
            states.append(loader.state_dict())
        for rank, state in enumerate(states):
            again = hr.DataLoader(endless(), global_batch_size=size, rank=rank, world_size=2, ranks="local")
            stack.enter_context(again).load_state_dict(state)
            assert next(iter(again))[0] == 30


@pytest.mark.parametrize("shuffled", [False, True])
def test_ranks_agree_about_the_rest_when_each_has_read_another_number_of_samples(
    written: Written, shuffled: bool
) -> None:
    def data() -> Any:
        shards = sources.source(TAR, written)
        return (shards.shuffle("window", window=7) if shuffled else shards).map(Seen()).epoch(samples=40)

    _, states = ran(2, data, global_batch_size=5, most=3)
    assert states[0]["samples"] != states[1]["samples"]
    with ExitStack() as stack:
        ranks = world(stack, 2, data, states, global_batch_size=5)
        plans = [loader._behind._next.plan() for loader in ranks.loaders]  # type: ignore[union-attr]
        assert plans[0].digest() == plans[1].digest()
        fresh = world(stack, 2, data, global_batch_size=5).loaders[1]._behind._next.plan()  # type: ignore[union-attr]
        assert fresh.digest() != plans[0].digest()
        assert sum(lengths(ranks.run())) == 25


@pytest.mark.parametrize("kind", ["filter", "known", TAR])
def test_every_sample_comes_once_when_ranks_with_uneven_tails_go_on(written: Written, kind: str) -> None:
    def data() -> Any:
        if kind == "filter":
            return filtered(written)
        return sources.source(TAR if kind == TAR else INDEXED, written).map(Seen())

    def rest(states: Any, size: int, **options: Any) -> Counter[Any]:
        with ExitStack() as stack:
            loaders = world(stack, size, data, states, tail="uneven", **options).loaders
            return Counter(sample for loader in loaders for batch in loader for sample in sources.rows(batch))

    steps, states = ran(3, data, batch_size=4, tail="uneven", most=1)
    got = samples(steps)
    expected = rest(None, 1, batch_size=8)
    assert max(expected.values()) == 1
    assert got + rest(states, 3, batch_size=4) == expected
    if kind != TAR:
        assert got + rest(merge_states(states), 2, global_batch_size=6) == expected
    with ExitStack() as stack, pytest.raises(hr.StateMismatchError):
        world(stack, 2, data, states[1], batch_size=4, tail="uneven")


def test_ranks_are_named_when_only_some_have_ended_an_uneven_epoch(places: Places) -> None:
    written = places.write([22])
    data = lambda: sources.source(MAP, written).map(Seen())
    with ExitStack() as stack:
        ranks = world(stack, 3, data, batch_size=7, tail="uneven")
        iterators = [iter(loader) for loader in ranks.loaders]
        batches = [[next(iterator, None) for iterator in iterators] for _ in range(2)]
        assert [batch is None for batch in batches[1]] == [True, True, False]
        states = ranks.states()
        expected = r"epoch 0 the ranks \[0, 1\] have received all, and the ranks \[2\] have not: with tail='uneven'"
        with pytest.raises(hr.StateMismatchError, match=expected) as caught:
            merge_states(states)
        assert caught.value.field == "epoch"
        assert [next(iterator, None) for iterator in iterators] == [None] * 3
        merge_states(ranks.states())
    with ExitStack() as stack:
        loaders = world(stack, 3, data, states, batch_size=7, tail="uneven").loaders
        assert [len(list(loader)) for loader in loaders] == [1, 1, 0]


def test_states_of_last_steps_are_refused_when_the_tail_is_another(places: Places) -> None:
    written = places.write([22])
    data = lambda: sources.source(MAP, written).map(Seen())
    _, states = ran(3, data, batch_size=7, tail="uneven", most=1)
    with ExitStack() as stack, pytest.raises(hr.StateMismatchError, match="tail='uneven'"):
        world(stack, 3, data, states, batch_size=7, tail="short", in_order=False)
