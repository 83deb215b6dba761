"""The boundaries of batches, and the order of turns."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.scheduler.batch_work import PrioritySemaphore
from headrace.engine.scheduler.position_map import BatchBoundaries, EvenBoundaries, GivenBoundaries


def check(boundaries: BatchBoundaries, sizes: list[int]) -> None:
    position = 0
    for number, size in enumerate(sizes):
        assert boundaries.start(number) == position
        assert boundaries.size(number) == size
        assert [boundaries.find(position + slot) for slot in range(size)] == [(number, slot) for slot in range(size)]
        position += size
    assert boundaries.find(position) == (len(sizes), 0)


@given(st.integers(1, 9), st.integers(0, 9))
def test_even_cuts_find_every_sample(size: int, count: int) -> None:
    check(EvenBoundaries(size), [size] * count)


@given(st.lists(st.integers(0, 5), max_size=9))
def test_given_cuts_find_every_sample_next_to_empty_batches(sizes: list[int]) -> None:
    boundaries = GivenBoundaries()
    assert [boundaries.add(size) for size in sizes] == list(range(len(sizes)))
    check(boundaries, sizes)
    assert boundaries.start(len(sizes) + 3) == sum(sizes)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("limit", [1, 2, None])
def test_turns_are_granted_by_number_within_the_limit(limit: int | None) -> None:
    async def main() -> list[int]:
        turns, order = PrioritySemaphore(limit), list[int]()
        inside, most = 0, 0

        async def work(number: int) -> None:
            nonlocal inside, most
            end = await turns.take(number)
            inside += 1
            most = max(most, inside)
            order.append(number)
            await settle()
            inside -= 1
            end()
            end()

        await asyncio.gather(*(work(number) for number in (5, 3, 4, 1, 2)))
        assert most == (limit or 5)
        return order

    order = asyncio.run(main())
    assert sorted(order) == [1, 2, 3, 4, 5]
    if limit == 1:
        assert order == [5, 1, 2, 3, 4]


def test_turn_of_a_cancelled_waiter_is_not_lost() -> None:
    async def main() -> None:
        turns = PrioritySemaphore(1)
        end = await turns.take(0)
        waiting = asyncio.create_task(turns.take(1))
        granted = asyncio.create_task(turns.take(0))
        await settle()
        waiting.cancel()
        end()
        granted.cancel()  # it has just been given the turn
        await asyncio.gather(waiting, granted, return_exceptions=True)
        (await asyncio.wait_for(turns.take(2), 5))()

    asyncio.run(main())
