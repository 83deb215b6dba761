"""A run that resumes with another number of ranks gives the same global batches."""

import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from builders.ranks import Rows, elastic_run, ran, samples, whole
from end_to_end.state import sources
from end_to_end.state.sources import INDEXED, KEYS, MAP, Places, Seen, Written

import headrace as hr
from headrace.state.state import merge_states

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
    order = rng.choice([name for name in ORDERS if kind == INDEXED or name in ("in order", "shuffled", "twice")])
    tail, size = rng.choice(["short", "drop", "pad", "carry"]), rng.choice([8, 12, 24])
    told = f"elastic {number}: {kind} {written.counts} {order}, last_batch={tail}, global batches of {size}"
    options: dict[str, Any] = {"ranks": hr.Ranks(global_batch_size=size, last_batch=tail), "num_workers": 0}
    return elastic_run(told, rng, lambda: made(kind, written, order), 8, **options)


@pytest.mark.slow
def test_global_batches_stay_the_same_when_the_world_changes(places: Places) -> None:
    resumes, number = 0, 0
    while resumes < RESUMES // 2:
        resumes += run(number, places)
        number += 1


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1), (1, 3), (3, 8)])
def test_global_batch_is_kept_when_only_the_world_changes(places: Places, before: int, after: int) -> None:
    """With the batch size that each rank had before; what each has then follows from the ranks."""
    written = places.write([40, 3, 60, 5])
    data = lambda: made(INDEXED, written, "window 40")
    expected = whole(ran(1, data, batch_size=4 * before if before > 1 else 9)[0])
    size = 4 if before > 1 else 9
    steps, states = ran(before, data, batch_size=size, most=3)
    got = whole(steps)
    state = states[0]
    got += whole(ran(after, data, state, batch_size=size)[0])
    assert got[:-2] == expected[:-2]
    assert sorted(sum(got, ())) == sorted(sum(expected, ()))


def test_each_sample_is_emitted_once_when_the_batch_size_changes(places: Places) -> None:
    written = places.write([40, 3, 60, 5])
    got, state = list[Rows](), None
    for count, size, most in ((3, 12, 2), (2, 10, 3), (1, 7, 2), (5, 20, None)):
        steps, (state, *_) = ran(
            count, lambda: made(INDEXED, written, "window 40"), state, ranks=hr.Ranks(global_batch_size=size), most=most
        )
        got += whole(steps)
    assert sorted(sample[1] for batch in got for sample in batch) == list(range(108))


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"batch_size": 2}])
def test_state_is_refused_when_world_and_batch_size_differ(places: Places, options: dict[str, Any]) -> None:
    written = places.write([60])
    data = lambda: made(INDEXED, written, "shuffled")
    state = ran(2, data, batch_size=4, most=2)[1][0]
    with pytest.raises(hr.StateMismatchError, match="global_batch_size") as caught:
        ran(3, data, state, **options)
    assert caught.value.field == "global_batch_size"


@pytest.mark.slow
def test_ranks_resume_from_their_own_states_when_batches_come_in_any_order(places: Places) -> None:
    written = places.write([40, 3, 60, 5])
    data, options = lambda: made(INDEXED, written, "window 40"), {"batch_size": 4, "in_order": False}
    expected = samples(ran(3, data, **options)[0])
    steps, states = ran(3, data, **options, most=4)
    assert [state["ranks"]["rank"] for state in states] == [0, 1, 2]
    rest, states = ran(3, data, states, **options)
    assert samples(steps) + samples(rest) == expected
    assert len({state["epoch"] for state in states}) == 1


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
