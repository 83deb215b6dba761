"""A damaged shard, as the training loop sees it: earlier batches, the error in its place, then the other shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from builders.loops import outcomes_of
from corpus import GROUPS, Case
from end_to_end.tars import numbered_samples, tar, wanted_sample

import headrace as hr
from headrace.fetch.stores import memory

URL, NEXT_URL = "memory://damaged/shard.tar", "memory://damaged/next.tar"
NEXT = numbered_samples(0, 3)


def epoch(case: Case, data: hr.Stream, num_workers: int) -> list[Any]:
    memory.put(URL, case.data)
    memory.put(NEXT_URL, tar(NEXT))
    with hr.DataLoader(data, batch_size=2, collate_fn=list, num_workers=num_workers, timeout=30) as loader:
        return outcomes_of(loader)


def wanted(case: Case) -> list[Any]:
    """Batches of two; one with the error in it is the error."""
    each: list[Any] = [wanted_sample(URL, key, dict(fields)) for key, fields in case.samples]
    if case.damage is not None:
        each.append(case.damage)
    each += [wanted_sample(NEXT_URL, key, fields) for key, fields in NEXT]
    batches: list[Sequence[Any]] = [each[at : at + 2] for at in range(0, len(each), 2)]
    return [next((sample for sample in batch if sample is case.damage), batch) for batch in batches]


def check(case: Case, num_workers: int) -> None:
    got = epoch(case, hr.stream([URL, NEXT_URL]), num_workers)
    told = [batch for batch in got if isinstance(batch, Exception)]
    assert [case.damage if batch in told else batch for batch in got] == wanted(case), case.name
    assert len(told) == (case.damage is not None), case.name
    for error in told:
        assert isinstance(error, hr.FormatError), case.name
        assert case.damage is not None
        assert (error.url, error.stage) == (URL, "scan"), case.name
        where = type(error).__name__, error.key, error.offset
        assert where == (case.damage.error, case.damage.key, case.damage.offset), case.name
        assert case.damage.says in str(error), case.name


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_damaged_shard_gives_earlier_batches_and_then_the_error(group: str) -> None:
    for case in GROUPS[group]:
        check(case, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize("group", GROUPS)
def test_a_damaged_shard_gives_the_same_when_workers_read_it(group: str) -> None:
    check(max(GROUPS[group], key=lambda case: (case.damage is not None, len(case.samples))), 2)
