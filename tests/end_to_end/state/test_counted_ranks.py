"""Ranks resume: the same global batches on any number of them, and equally many steps of uncounted samples."""

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders.numbers import Counting
from builders.ranks import elastic_run, ran, samples, whole, world
from end_to_end.state import sources
from end_to_end.state.sources import GZ, INDEXED, KEYS, MAP, TAR, Places, Seen, Written
from end_to_end.state.test_resume_anywhere import joined
from gloo import ranks_of

import headrace as hr
from headrace.state.state import merge_states


@pytest.fixture(scope="module")
def written(places: Places) -> Written:
    return places.write([40, 3, 60, 5])


def filtered(written: Written) -> Any:
    return sources.source(INDEXED, written).shuffle("window", window=20).map(Seen()).filter(sources.most)


def counted(written: Written, kind: str, count: int, *, shuffled: bool = True) -> Any:
    """An epoch of filtered samples, or of shards without an index: nobody knows how many samples a rank has."""
    if kind == TAR:
        return sources.source(TAR, written).map(Seen()).epoch(samples=count)
    in_order = sources.source(INDEXED, written).map(Seen()).filter(sources.most)
    return (filtered(written) if shuffled else in_order).epoch(samples=count)


def lengths(steps: Any) -> list[int]:
    return [sum(map(len, step)) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_ranks_resume_from_their_own_states_of_filtered_samples(written: Written, in_order: bool) -> None:
    data = lambda: counted(written, INDEXED, 60)
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
    assert [samples(first) + samples(rest), samples(then)] == [samples(steps) for steps in expected]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (2, 4)])
def test_merged_states_of_filtered_samples_give_each_sample_once(written: Written, before: int, after: int) -> None:
    data = lambda: counted(written, INDEXED, 60)
    steps, states = ran(before, data, batch_size=12 // before, most=2)
    rest, _ = ran(after, data, merge_states(states), batch_size=12 // before)  # the global batch is kept
    assert lengths(rest)[:-2] == [12] * (len(rest) - 2)
    got = samples(steps) + samples(rest)
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
def test_ranks_refuse_an_epoch_that_may_end_sooner_on_one_of_them(written: Written, case: str) -> None:
    with pytest.raises(hr.OptionError, match="different numbers of batches"):
        ran(2, lambda: ENDS_SOONER[case](written), batch_size=4)


@pytest.mark.parametrize("size", [4, 5])
def test_ranks_share_what_is_taken_of_an_epoch_of_samples_without_numbers(written: Written, size: int) -> None:
    assert (
        sum(lengths(ran(2, lambda: counted(written, TAR, 60).take(10), ranks=hr.Ranks(global_batch_size=size))[0]))
        == 10
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEXED, TAR])
def test_ranks_skip_steps_and_only_merge_states_of_numbered_samples(written: Written, kind: str) -> None:
    data = lambda: counted(written, kind, 30)
    expected, _ = ran(2, data, batch_size=4)
    with ExitStack() as stack:
        ranks = world(stack, 2, data, batch_size=4)
        for loader in ranks.loaders:
            loader.skip(3)
        states = ranks.states()
        assert ranks.run() == expected[3:]
    if kind == INDEXED:
        assert lengths(ran(2, data, merge_states(states), batch_size=4)[0]) == [6]
    else:
        with pytest.raises(hr.StateMismatchError, match="each rank's own"):
            merge_states(states)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "size", "after"), [(10, 4, 3), (12, 5, 2), (6, 20, 1)])
def test_ranks_make_as_many_steps_of_another_size(written: Written, before: int, size: int, after: int) -> None:
    data = lambda: counted(written, INDEXED, 63)
    steps, states = ran(2, data, ranks=hr.Ranks(global_batch_size=before), most=3)
    got = lengths(steps)
    steps, states = ran(after, data, merge_states(states), ranks=hr.Ranks(global_batch_size=size), most=2)
    got += lengths(steps)
    assert got == [before] * 3 + [size] * 2
    rest = lengths(ran(after, data, states, ranks=hr.Ranks(global_batch_size=size))[0])  # each from its own
    assert sum(got) + sum(rest) == 63
    assert rest[:-2] == [size] * (len(rest) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEXED, TAR])
def test_another_batch_size_holds_from_the_first_step_of_ranks_that_resume(written: Written, kind: str) -> None:
    data = lambda: counted(written, kind, 64)
    got, states = ran(2, data, batch_size=4, most=2)
    for _ in range(2):
        steps, states = ran(2, data, states, batch_size=6, most=1)
        got += steps
    got += ran(2, data, states, batch_size=3)[0]
    assert lengths(got) == [8, 8, 12, 12, 6, 6, 6, 6]
    assert max(samples(got).values()) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # three workers for three batches
@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("filters", [False, True])
def test_ranks_make_as_many_steps_after_a_short_batch_of_one(written: Written, filters: bool, size: int) -> None:
    go_on = threading.Event()

    data = lambda: counted(written, INDEXED if filters else TAR, 20, shuffled=False)

    def late(batch: list[Any]) -> list[Any]:
        assert len(batch) < 4 or go_on.wait(30)
        return batch

    received, states = [], []
    for rank in range(2):
        if rank:
            go_on.set()
        options: dict[str, Any] = {"num_workers": 3, "workers": "thread", "collate_fn": list if rank else late}
        with hr.DataLoader(
            data(), batch_size=4, ranks=hr.Ranks(rank=rank, world_size=2), in_order=bool(rank), **options
        ) as loader:
            received.append(len(next(iter(loader))))
            states.append({**loader.state_dict()})
            go_on.set()
    assert received == [2, 4]
    if size == 4:
        assert sorted(lengths(ran(2, data, states, batch_size=size, in_order=False)[0])) == [6, 8]
        return
    with pytest.raises(hr.StateMismatchError) as caught:
        ran(2, data, states, batch_size=size, in_order=False)
    assert ("merge_states" in str(caught.value)) == filters


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_of_an_ended_epoch_has_its_last_batch_size(written: Written, ranks: int) -> None:
    data = lambda: counted(written, INDEXED, 60)
    _, states = ran(ranks, data, batch_size=4, most=2)
    with ExitStack() as stack:
        some = world(stack, ranks, data, states, batch_size=6)
        some.run()
        states, expected = some.states(), some.run()
    sizes = [state["ranks"] for state in states]
    assert {(of["global_batch_size"], of["batch_size"]) for of in sizes} == {(6 * ranks, 6)}
    assert ran(ranks, data, states, batch_size=6)[0] == expected
    assert lengths(ran(1, data, merge_states(states), batch_size=6)[0])[0] == 6 * ranks


@pytest.mark.parametrize("size", [4, 5])
def test_iterables_of_ranks_continue_in_the_next_epoch_with_another_batch_size(size: int) -> None:
    with ExitStack() as stack:
        endless = lambda: Counting(ranks_by="shard_info").epoch(samples=60)
        ranks = [hr.DataLoader(endless(), ranks=hr.Ranks(global_batch_size=4, rank=r, world_size=2)) for r in (0, 1)]
        states = []
        for loader in map(stack.enter_context, ranks):
            assert sum(map(len, loader)) == 30
            states.append(loader.state_dict())
        for rank, state in enumerate(states):
            again = hr.DataLoader(
                endless(), ranks=hr.Ranks(global_batch_size=size, rank=rank, world_size=2, compare=False)
            )
            stack.enter_context(again).load_state_dict(state)
            assert next(iter(again))[0] == 30


@pytest.mark.parametrize("shuffled", [False, True])
def test_ranks_agree_on_the_rest_when_each_has_read_another_number_of_samples(written: Written, shuffled: bool) -> None:
    def data() -> Any:
        shards = sources.source(TAR, written)
        return (shards.shuffle("window", window=7) if shuffled else shards).map(Seen()).epoch(samples=40)

    _, states = ran(2, data, ranks=hr.Ranks(global_batch_size=5), most=3)
    assert states[0]["samples"] != states[1]["samples"]
    with ExitStack() as stack:
        ranks = world(stack, 2, data, states, ranks=hr.Ranks(global_batch_size=5))
        plans = [loader._behind._next.plan() for loader in ranks.loaders]  # type: ignore[union-attr]
        assert plans[0].digest() == plans[1].digest()
        fresh = world(stack, 2, data, ranks=hr.Ranks(global_batch_size=5)).loaders[1]._behind._next.plan()  # type: ignore[union-attr]
        assert fresh.digest() != plans[0].digest()
        assert sum(lengths(ranks.run())) == 25


@pytest.mark.parametrize("kind", ["filter", "known", TAR])
def test_each_sample_is_emitted_once_when_ranks_with_uneven_tails_resume(written: Written, kind: str) -> None:
    def data() -> Any:
        if kind == "filter":
            return filtered(written)
        return sources.source(TAR if kind == TAR else INDEXED, written).map(Seen())

    def rest(states: Any, size: int, global_batch_size: int | None = None, **options: Any) -> Counter[Any]:
        uneven = hr.Ranks(last_batch="uneven", global_batch_size=global_batch_size)
        with ExitStack() as stack:
            loaders = world(stack, size, data, states, ranks=uneven, **options).loaders
            return Counter(sample for loader in loaders for batch in loader for sample in sources.rows(batch))

    steps, states = ran(3, data, batch_size=4, ranks=hr.Ranks(last_batch="uneven"), most=1)
    got = samples(steps)
    expected = rest(None, 1, batch_size=8)
    assert max(expected.values()) == 1
    assert got + rest(states, 3, batch_size=4) == expected
    if kind != TAR:
        assert got + rest(merge_states(states), 2, 6) == expected
    with pytest.raises(hr.StateMismatchError):
        ran(2, data, states[1], batch_size=4, ranks=hr.Ranks(last_batch="uneven"))


def test_ranks_are_named_when_only_some_have_ended_an_uneven_epoch(places: Places) -> None:
    written = places.write([22])
    data = lambda: sources.source(MAP, written).map(Seen())
    with ExitStack() as stack:
        ranks = world(stack, 3, data, batch_size=7, ranks=hr.Ranks(last_batch="uneven"))
        iterators = [iter(loader) for loader in ranks.loaders]
        batches = [[next(iterator, None) for iterator in iterators] for _ in range(2)]
        assert [batch is None for batch in batches[1]] == [True, True, False]
        states = ranks.states()
        expected = r"epoch 0 the ranks \[0, 1\] have received all, and the ranks \[2\] have not: with hr"
        with pytest.raises(hr.StateMismatchError, match=expected) as caught:
            merge_states(states)
        assert caught.value.field == "epoch"
        assert [next(iterator, None) for iterator in iterators] == [None] * 3
        merge_states(ranks.states())
    with ExitStack() as stack:
        loaders = world(stack, 3, data, states, batch_size=7, ranks=hr.Ranks(last_batch="uneven")).loaders
        assert [len(list(loader)) for loader in loaders] == [1, 1, 0]


def test_state_of_uneven_last_steps_is_refused_with_another_tail(places: Places) -> None:
    written = places.write([22])
    data = lambda: sources.source(MAP, written).map(Seen())
    _, states = ran(3, data, batch_size=7, ranks=hr.Ranks(last_batch="uneven"), most=1)
    with pytest.raises(hr.StateMismatchError, match="last_batch='uneven'"):
        ran(3, data, states, batch_size=7, in_order=False)


# Shards without an index: what one rank and several can make of each other's states.

COUNTS = [20, 3, 31, 6]


@pytest.fixture
def unindexed(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return places.write(COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_one_rank_resumes_when_several_have_made_an_index(unindexed: Written, shuffled: bool) -> None:
    def data() -> Any:
        shards = sources.source(TAR, unindexed)
        return (shards.shuffle() if shuffled else shards).map(Seen())

    def epochs(world_size: int, count: int, state: Any = None) -> list[Any]:
        with ExitStack() as stack:
            ranks = world(stack, world_size, data, state, ranks=hr.Ranks(global_batch_size=6))
            return [batch for _ in range(count) for batch in whole(ranks.run())]

    steps, states = ran(3, data, ranks=hr.Ranks(global_batch_size=6), most=4)
    got = whole(steps) + epochs(1, 2, states[1])
    assert got == epochs(3, 2)
    assert sorted(number for batch in got for _, number, *_ in batch) == sorted([*range(sum(COUNTS))] * 2)


def test_several_ranks_refuse_a_state_of_one_that_has_read_without_an_index(unindexed: Written) -> None:
    data = lambda: sources.source(TAR, unindexed).shuffle().map(Seen())
    _, (state,) = ran(1, data, batch_size=6, most=2)
    with ExitStack() as stack:
        (loader,) = world(stack, 2, data, batch_size=6).loaders[:1]
        message = r"without an index, and 2 ranks.*set_epoch.*index=.build"
        with pytest.raises(hr.StateMismatchError, match=message) as caught:
            loader.load_state_dict(state)
        assert caught.value.field == "index"
        loader.set_epoch(1)
        assert len(next(iter(loader))["n"]) == 6
    indexed = lambda: hr.stream(unindexed.urls[TAR], index="build").shuffle().map(Seen())
    got, (state,) = ran(1, indexed, ranks=hr.Ranks(global_batch_size=6), most=2)
    got += ran(2, indexed, state, ranks=hr.Ranks(global_batch_size=6))[0]
    assert set(samples(got).values()) == {1}
    assert sum(samples(got).values()) == sum(COUNTS)


def test_state_of_other_data_is_refused_and_makes_no_index(unindexed: Written, places: Places) -> None:
    other = places.write([5, 5])
    with ExitStack() as stack:
        state = world(stack, 2, lambda: sources.source(TAR, unindexed), ranks=hr.Ranks(global_batch_size=6)).states()[0]
        alone = world(stack, 1, lambda: sources.source(TAR, other), batch_size=6).loaders[0]
        with pytest.raises(hr.StateMismatchError, match="the data differ"):
            alone.load_state_dict(state)
        with pytest.raises(TypeError, match="counted while they are read"):
            len(alone)


@pytest.mark.parametrize("kind", [TAR, GZ])
def test_state_of_the_shards_of_one_rank_is_refused_by_other_ranks(unindexed: Written, kind: str) -> None:
    data = lambda: sources.source(kind, unindexed).map(Seen()).epoch(samples=60)
    _, (_, state) = ran(2, data, batch_size=4, most=2)
    for size in (1, 3):
        with pytest.raises(hr.StateMismatchError, match=r"shards of their own.*with 2 of them"):
            ran(size, data, state, batch_size=4)


@pytest.mark.slow
def test_ranks_share_compressed_shards_when_a_filter_stands_before_the_epoch(places: Places) -> None:
    written = places.write([40, 20, 31, 26])
    data = lambda: sources.source(GZ, written).map(Seen()).filter(sources.most).epoch(samples=60)
    got, states = ran(2, data, batch_size=4, most=3)
    got += ran(2, data, states, batch_size=4)[0]
    assert sum(samples(got).values()) == 60
    assert {len(batch) for step in got[:-1] for batch in step} == {4}


RESUMES = int(os.environ.get("HEADRACE_RESUMES", "60"))
ORDERS: dict[str, Callable[[Any], Any]] = {
    "in order": lambda data: data,
    "shuffled": lambda data: data.shuffle(),
    "window 40": lambda data: data.shuffle("window", window=40),
    "window 9": lambda data: data.shuffle("window", window=9, seed=8),
    "within": lambda data: data.shuffle("within"),
    "shards": lambda data: data.shuffle("shards", seed=3),
    "global": lambda data: data.shuffle("global"),
    "twice": lambda data: data.shuffle().repeat(2),
    "most of them": lambda data: data.shuffle().epoch(samples=97),
}


def made(kind: str, written: Written, order: str) -> Any:
    return ORDERS[order](sources.source(kind, written)).map(Seen())


def run(number: int, places: Places) -> int:
    rng = random.Random(f"elastic {number}")
    written = places.write([rng.choice([0, 1, 7, 20, 33]) for _ in range(3)] + [70])
    kind = rng.choice([INDEXED, INDEXED, KEYS, MAP])
    inputs, several = joined(kind, written, rng)
    is_indexed = kind == INDEXED and several is None
    order = rng.choice([name for name in ORDERS if is_indexed or name in ("in order", "shuffled", "twice")])
    tail, size = rng.choice(["short", "drop", "pad", "carry"]), rng.choice([8, 12, 24])
    told = f"elastic {number}: {inputs or kind} {written.counts} {order}, last_batch={tail}, global batches of {size}"
    options: dict[str, Any] = {"ranks": hr.Ranks(global_batch_size=size, last_batch=tail), "num_workers": 0}
    make = several or partial(sources.source, kind, written)
    try:
        with hr.DataLoader(ORDERS[order](make())) as loader:
            len(loader)
    except (hr.OptionError, TypeError):
        return 0  # documents that were shuffled before they were packed are no input; or ranks cannot share them
    return elastic_run(told, rng, lambda: ORDERS[order](make()).map(Seen()), 8, **options)


@pytest.mark.slow
def test_global_batches_stay_the_same_when_the_world_changes(places: Places) -> None:
    resumes, number = 0, 0
    while resumes < RESUMES // 2:
        resumes += run(number, places)
        number += 1


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"batch_size": 2}])
def test_state_is_refused_when_world_and_batch_size_differ(places: Places, options: dict[str, Any]) -> None:
    written = places.write([60])
    data = lambda: made(INDEXED, written, "shuffled")
    state = ran(2, data, batch_size=4, most=2)[1][0]
    with pytest.raises(hr.StateMismatchError, match="global_batch_size") as caught:
        ran(3, data, state, **options)
    assert caught.value.field == "global_batch_size"


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (2, 5), (1, 4)])
@pytest.mark.parametrize("in_order", [False, True])
def test_merged_states_resume_on_any_ranks(places: Places, before: int, after: int, in_order: bool) -> None:
    written = places.write([40, 3, 60, 5])
    data = lambda: made(INDEXED, written, "window 40")
    expected = samples(ran(1, data, ranks=hr.Ranks(global_batch_size=12))[0])
    steps, states = ran(before, data, ranks=hr.Ranks(global_batch_size=12), in_order=False, most=4)
    got = samples(steps)
    random.Random(4).shuffle(states)
    merged = json.loads(json.dumps(merge_states(states)))
    steps, states = ran(after, data, merged, ranks=hr.Ranks(global_batch_size=12), in_order=in_order, most=2)
    got += samples(steps)
    assert not any("since" in state for state in states)
    assert (
        got + samples(ran(1, data, merge_states(states), ranks=hr.Ranks(global_batch_size=5), in_order=in_order)[0])
        == expected
    )


RANK = """
import hashlib
import torch.distributed as dist
import headrace as hr
from end_to_end.state.sources import Seen

def main(settings, urls, index):
    dist.init_process_group("gloo")

    def loader_of(concurrency="auto", **options):
        data = hr.stream(urls, index=index).shuffle("window", window=40).map(Seen(with_torch=True))
        fetch, ranks = hr.Fetch(range_bytes=4096, concurrency=concurrency), hr.Ranks(global_batch_size=12)
        return hr.DataLoader(data, ranks=ranks, fetch=fetch, timeout=50, **options)

    def digests(batch, with_torch):  # without workers, torch's own random numbers are the trainer's
        columns = [batch[name].numpy() for name in sorted(batch) if with_torch or name != "torch"]
        return [hashlib.sha256(b"".join(value.tobytes() for value in row)).hexdigest() for row in zip(*columns)]

    found = {}
    for workers, concurrency in settings:
        with loader_of(concurrency, num_workers=workers) as loader:
            found[f"{workers} {concurrency}"] = [[digests(batch, workers > 0) for batch in loader] for _ in range(2)]
    if dist.get_world_size() > 1:
        with loader_of(seed=int(dist.get_rank() == 1)) as loader:
            try:
                next(iter(loader))
            except hr.StateMismatchError as error:
                found["refused"] = str(error)
    dist.destroy_process_group()
    return found
"""
IS_LONG = int(os.environ.get("HEADRACE_RESUMES", "60")) > 60
WORLDS = (2, 3) if IS_LONG else (3,)
SETTINGS = [(0, 1), (0, 64), (1, 1), (1, 64), (4, 1), (4, 64)] if IS_LONG else [(0, 64), (1, 64), (4, 1)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_batches_are_those_of_a_single_rank_byte_for_byte_with_any_workers_and_reads(places: Places) -> None:
    """Over HTTP, with torch's process group; random numbers too."""
    written = places.write([40, 3, 0, 60, 25], size=300)
    index = places.server.add("ranks.hri", asyncio.run(hr.read(written.index)))
    arguments = [SETTINGS, written.urls[sources.TAR], index]
    (alone,) = ranks_of(1, RANK, arguments)
    first, second = alone["0 64"]
    assert len({digest for batch in first for digest in batch}) == written.total
    assert first != second
    assert alone["1 64"] != alone["0 64"]  # with torch's random numbers
    for workers, concurrency in SETTINGS:
        assert alone[f"{workers} {concurrency}"] == alone["1 64" if workers else "0 64"]
    for size in WORLDS:
        ranks = ranks_of(size, RANK, arguments)
        for workers, concurrency in SETTINGS:
            expected = alone["1 64" if workers else "0 64"]
            for number in range(2):
                steps = zip(*(rank[f"{workers} {concurrency}"][number] for rank in ranks), strict=True)
                found = [[digest for batch in step for digest in batch] for step in steps]
                assert found == expected[number], f"{size} ranks, {workers} workers, {concurrency} reads"
        assert all("1" in rank["refused"] for rank in ranks)  # the last loader of one rank has another seed
