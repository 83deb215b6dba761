"""A run that resumes with another number of ranks gives the same global batches."""

import json
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from builders.ranks import Rows, elastic_run, ran, samples, whole
from end_to_end.state import sources
from end_to_end.state.sources import INDEXED, KEYS, MAP, Places, Seen, Written
from end_to_end.state.test_resume_anywhere import joined

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
    inputs, several = joined(kind, written, rng)
    is_indexed = kind == INDEXED and several is None
    order = rng.choice([name for name in ORDERS if is_indexed or name in ("in order", "shuffled", "twice")])
    tail, size = rng.choice(["short", "drop", "pad", "carry"]), rng.choice([8, 12, 24])
    told = f"elastic {number}: {inputs or kind} {written.counts} {order}, last_batch={tail}, global batches of {size}"
    options: dict[str, Any] = {"ranks": hr.Ranks(global_batch_size=size, last_batch=tail), "num_workers": 0}
    make = several or partial(sources.source, kind, written)
    try:
        make()
    except hr.OptionError:
        return 0  # documents that were shuffled before they were packed are no input
    return elastic_run(told, rng, lambda: ORDERS[order](make()).map(Seen()), 8, **options)


@pytest.mark.slow
def test_global_batches_stay_the_same_when_the_world_changes(places: Places) -> None:
    resumes, number = 0, 0
    while resumes < RESUMES // 2:
        resumes += run(number, places)
        number += 1


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
