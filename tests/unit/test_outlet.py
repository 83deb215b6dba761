"""Borders of batches, batches with failures, and outlets of inputs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.channel import ChannelFailedError
from headrace.engine.scheduler.assembler import Outlet
from headrace.engine.scheduler.batch_work import BatchState, OpenBatch
from headrace.engine.scheduler.dispatch import Budget
from headrace.engine.scheduler.position_map import BatchBoundaries, EvenBoundaries, GivenBoundaries, PositionMap
from headrace.state.state import ResumePoint
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import ListPart
from headrace.workers.task_runner import open_part


def check_boundaries(boundaries: BatchBoundaries, sizes: list[int]) -> None:
    position = 0
    for number, size in enumerate(sizes):
        assert boundaries.start(number) == position
        assert boundaries.size(number) == size
        assert [boundaries.find(position + slot) for slot in range(size)] == [(number, slot) for slot in range(size)]
        position += size
    assert boundaries.find(position) == (len(sizes), 0)


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 9))
def test_boundaries_find_every_sample_next_to_empty_batches(sizes: list[int], size: int) -> None:
    check_boundaries(EvenBoundaries(size), [size] * len(sizes))
    boundaries = GivenBoundaries()
    assert [boundaries.add(size) for size in sizes] == list(range(len(sizes)))
    check_boundaries(boundaries, sizes)
    assert boundaries.start(len(sizes) + 3) == sum(sizes)


async def settle(turns: int = 5) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.asyncio
@given(st.data(), st.lists(st.integers(1, 5), max_size=6))
async def test_outlet_gives_samples_in_order_and_resume_points(data: st.DataObject, sizes: list[int]) -> None:
    starts, position_map = list(itertools.accumulate(sizes, initial=0)), PositionMap()
    outlet, got, ends = Outlet(position_map, Budget(100, int, int)), list[Any](), list[None]()
    outlet.attach(lambda: None, lambda: ends.append(None))

    async def consume() -> None:
        while (part := await outlet.take()) is not None:
            got.extend(open_part(part))
            count = data.draw(st.integers(len(got) - part.count + 1, len(got)))
            begin = ResumePoint(batches=3, samples=4, skipped=(1, 0))
            after = outlet.after(count, begin)
            assert (after.covers, after.used, after.skipped) == (((0, count),), count, (1, 0))
            assert (after.batches, after.samples) == (3 + count, 4 + count)

    consuming = asyncio.create_task(consume())
    await settle()
    assert outlet.lacks(None)
    assert outlet.lacks(0)
    assert not outlet.lacks(1)
    for k in data.draw(st.permutations(range(len(sizes)))):
        position_map.put(starts[-1])
        outlet.add(starts[k], ListPart(list(range(starts[k], starts[k + 1]))))
        await settle(data.draw(st.integers(0, 2)))
    assert not ends
    outlet.end(starts[-1])
    await consuming
    assert got == list(range(starts[-1]))
    assert ends
    assert not outlet.has_waiting


@pytest.mark.asyncio
async def test_outlet_gives_the_error_of_its_epoch_once() -> None:
    outlet = Outlet(PositionMap(), Budget(100, int, int))
    taking = asyncio.create_task(outlet.take())
    await settle()
    outlet.fail(PackedError(b"why"))
    outlet.fail(PackedError(b"later"))
    with pytest.raises(ChannelFailedError) as caught:
        await taking
    assert caught.value.failure == PackedError(b"why")
    assert await outlet.take() is None


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.sets(st.integers(0, 23), max_size=3))
def test_batch_is_whole_up_to_its_first_failure(data: st.DataObject, sizes: Sequence[int], failing: set[int]) -> None:
    size = sum(sizes)
    batch, came = OpenBatch(0, 0, size, size), set[int]()
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    wanted = size
    for k in data.draw(st.permutations(range(len(sizes)))):
        slots = range(starts[k], starts[k] + sizes[k])
        batch.take_in(starts[k], ListPart(list(slots)))
        came |= set(slots)
        for slot in sorted(failing.intersection(slots)):
            batch.end_with(slot, PackedError(b"%d" % slot))
            wanted = min(wanted, slot + 1)
        assert batch.wanted == wanted
        assert batch.is_whole == came.issuperset(range(wanted))
        held = sorted(slot for part in batch.parts.values() for slot in part.samples[part.start :][: part.count])
        assert held == sorted(slot for slot in came if slot < wanted)
    assert batch.arrived == size
    assert not batch.is_over
    batch.state = BatchState.READY
    assert batch.is_over
