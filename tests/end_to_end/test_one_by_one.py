"""The cost of a sample does not depend on the number of samples."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from builders.loops import rest_of, state_after
from builders.numbers import Counting, Numbers
from tests.end_to_end.tars import numbered_samples, tar

import headrace as hr
from headrace.fetch.stores import memory

FEW, MANY = 250, 2000


def is_kept(_: Any) -> bool:
    return True


async def is_kept_by_the_loop(_: Any) -> bool:
    return True


def shard(count: int) -> list[str]:
    memory.put(f"memory://one-by-one/{count}.tar", tar(numbered_samples(0, count, 10)))
    return [f"memory://one-by-one/{count}.tar"]


def shards(count: int) -> list[str]:
    urls = [f"memory://one-by-one/{count}-{k}.tar" for k in range(count // 50)]
    for k, url in enumerate(urls):
        memory.put(url, tar(numbered_samples(50 * k, 50, 10)))
    return urls


KINDS: dict[str, Any] = {
    "alone": lambda n: (hr.stream(shard(n)), {"batch_size": None}),
    "batches of one": lambda n: (hr.stream(shard(n)), {"batch_size": 1}),
    "batches of three": lambda n: (hr.stream(shard(n)), {"batch_size": 3}),
    "shuffled": lambda n: (hr.stream(shard(n)).shuffle(seed=1), {}),
    "filtered": lambda n: (hr.stream(shard(n)).filter(is_kept), {}),
    "filtered by the loop": lambda n: (hr.stream(shard(n)).filter(is_kept_by_the_loop), {}),
    "skipping": lambda n: (hr.stream(shard(n)), {"on_error": "skip"}),
    "in any order": lambda n: (hr.stream(shard(n)), {"in_order": False}),
    "many shards": lambda n: (hr.stream(shards(n)), {}),
    "by number": lambda n: (Numbers(n), {}),
    "as they come": lambda n: (Counting(n), {}),
}


def calls_for(kind: str, count: int, *, is_resumed: bool) -> float:
    data, options = KINDS[kind](count)
    state: dict[str, Any] = {}
    if is_resumed:
        state = state_after(hr.DataLoader(data, **options), 10)
    calls = itertools.count()

    def called(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            next(calls)

    threading.setprofile(called)
    try:
        assert sum(1 for _ in rest_of(hr.DataLoader(data, **options), state)) > count // 4
    finally:
        threading.setprofile(None)
    return next(calls) / count


@pytest.mark.slow
@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sample_costs_as_many_calls_when_there_are_more_of_them(kind: str, is_resumed: bool) -> None:
    few, many = (calls_for(kind, count, is_resumed=is_resumed) for count in (FEW, MANY))
    assert many < 1.5 * few
