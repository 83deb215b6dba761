"""A cache that several data sets and processes have: what is kept for whom, and who reads what all of them want."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.cache_use import BLOCK, LARGE, LIMIT, URL, blocks, has, keep

from headrace._util.reads import Span
from headrace.fetch import cache as cache_module
from headrace.fetch.cache import Cache

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def epoch(cache: Cache, numbers: list[int], size: int = BLOCK // 2) -> int:
    found = 0
    for number in numbers:
        if await has(cache, f"{URL}/{number}"):
            found += 1
        else:
            await keep(cache, f"{URL}/{number}", bytes(size))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fixed", "shuffled"])
@pytest.mark.parametrize("room", [10, 50, 90])
async def test_as_much_of_each_epoch_is_there_as_fits(tmp_path: Path, order: str, room: int) -> None:
    draws, numbers = random.Random(0), list(range(100))
    for _ in range(3):  # and so it stays in the next run
        cache = Cache(tmp_path, room * BLOCK, data_set="one")
        for _ in range(2):
            draws.shuffle(numbers) if order == "shuffled" else None
            found = await epoch(cache, numbers)
        assert found == room
        await cache.aclose()


async def test_data_set_that_nobody_uses_makes_room_for_the_next_one(tmp_path: Path) -> None:
    first = Cache(tmp_path, LIMIT, data_set="first")
    assert await epoch(first, list(range(100))) == 0
    second = Cache(tmp_path, LIMIT, data_set="second")
    assert await epoch(second, list(range(100, 150))) == 0
    assert (second.written, second.dropped) == (0, 50), "all that is there is in use"
    await second.aclose()
    await first.aclose()
    third = Cache(tmp_path, LIMIT, data_set="third")
    assert await epoch(third, list(range(100, 150))) == 0
    assert await epoch(third, list(range(100, 150))) == 50
    await third.aclose()
    again = Cache(tmp_path, LIMIT, data_set="first")
    assert 40 <= await epoch(again, list(range(100))) <= 50
    await again.aclose()
    assert blocks(tmp_path) <= 100


async def test_what_two_data_sets_have_in_common_is_kept_once_and_goes_over_to_the_one_in_use(tmp_path: Path) -> None:
    first = Cache(tmp_path, LIMIT, data_set="first")
    await epoch(first, list(range(60)))
    second = Cache(tmp_path, LIMIT, data_set="second")
    assert await epoch(second, list(range(40))) == 40
    await first.aclose()
    assert await epoch(second, list(range(40))) == 40
    third = Cache(tmp_path, LIMIT, data_set="third")
    await epoch(third, list(range(100, 200)))
    assert await epoch(second, list(range(40))) == 40
    for cache in (second, third):
        await cache.aclose()
    assert blocks(tmp_path) <= 100


async def test_entries_of_folders_of_before_are_found_and_make_room(tmp_path: Path) -> None:
    before = Cache(tmp_path, LIMIT)
    await epoch(before, list(range(100)))
    await before.aclose()
    now = Cache(tmp_path, LIMIT, data_set="one")
    assert await epoch(now, list(range(50))) == 50
    assert await epoch(now, list(range(200, 250))) == 0
    assert await epoch(now, [*range(50), *range(200, 250)]) == 100
    await now.aclose()


def test_full_folder_is_looked_through_now_and_then_only(tmp_path: Path) -> None:
    now = time.time()

    async def run() -> None:
        nonlocal now
        first, second = (Cache(tmp_path, LIMIT, data_set=name, clock=lambda: now) for name in ("first", "second"))
        await epoch(first, list(range(100)))
        await epoch(second, [200])
        await first.aclose()
        await epoch(second, [200])
        assert second.dropped == 2, "it is as full as it was"
        now += 61
        await epoch(second, [200])
        assert (second.written, second.dropped) == (1, 2)
        await second.aclose()

    asyncio.run(run())


async def test_one_reads_what_several_want_and_the_others_get_what_it_puts(tmp_path: Path) -> None:
    one, other = (Cache(tmp_path, LARGE, data_set="one") for _ in range(2))  # as of two processes
    assert await one.get_or_begin(URL, None, None) == (None, True)
    waiting = [asyncio.ensure_future(cache.get_or_begin(URL, None, None)) for cache in (one, other, other)]
    assert await other.get_or_begin(f"{URL}/2", None, None) == (None, True), "it waits for this one alone"
    other.end(f"{URL}/2", None, None)
    assert not any(wait.done() for wait in waiting)
    await one.put(URL, None, None, Span(0, 3, 3, None), b"abc")
    one.end(URL, None, None)
    for found, is_begun in await asyncio.gather(*waiting):
        assert found is not None
        assert (found.data, is_begun) == (b"abc", False)
    for cache in (one, other):
        await cache.aclose()


async def test_another_one_reads_it_where_the_first_one_has_failed(tmp_path: Path) -> None:
    caches = [Cache(tmp_path, LARGE, data_set="one") for _ in range(3)]
    assert await caches[0].get_or_begin(URL, None, None) == (None, True)
    waiting = {asyncio.ensure_future(cache.get_or_begin(URL, None, None)): cache for cache in caches[1:]}
    caches[0].end(URL, None, None)
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert len(left) == 1, "one after the other"
    (first,), (second,) = done, left
    assert first.result() == (None, True)
    await waiting[first].put(URL, None, None, Span(0, 3, 3, None), b"abc")
    waiting[first].end(URL, None, None)
    found, is_begun = await second
    assert found is not None
    assert not is_begun
    for cache in caches:
        await cache.aclose()


async def test_who_waits_too_long_reads_it_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_OTHERS_S", 0.01)
    one, other = (Cache(tmp_path, LARGE, data_set="one") for _ in range(2))
    assert await one.get_or_begin(URL, None, None) == (None, True)
    assert await other.get_or_begin(URL, None, None) == (None, False)
    assert await one.get_or_begin(URL, None, None) == (None, False)
    one.end(URL, None, None)
    for cache in (one, other):
        await cache.aclose()


async def test_cancelled_reads_keep_nobody_waiting(tmp_path: Path) -> None:
    one, other = (Cache(tmp_path, LARGE, data_set="one") for _ in range(2))
    for turns in range(8):
        asked = [asyncio.ensure_future(one.get_or_begin(f"{URL}/{n}", None, None)) for n in range(10)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for n, outcome in enumerate(outcomes):
            if not isinstance(outcome, BaseException):
                one.end(f"{URL}/{n}", None, None)
        for n in range(10):
            assert await other.get_or_begin(f"{URL}/{n}", None, None) == (None, True)
            other.end(f"{URL}/{n}", None, None)
    for cache in (one, other):
        await cache.aclose()


async def test_nobody_waits_for_what_will_not_be_kept(tmp_path: Path) -> None:
    one, other = (Cache(tmp_path, LIMIT, data_set="one") for _ in range(2))
    for cache in (one, other):
        await epoch(cache, list(range(101)))
    for _ in range(2):
        for cache in (one, other):
            assert await cache.get_or_begin(f"{URL}/200", None, None) == (None, False)
    for cache in (one, other):
        await cache.aclose()


HOLDER = """
import asyncio, sys
from headrace.fetch.cache import Cache

async def run():
    cache = Cache(sys.argv[1], 2**30, data_set="one")
    print(await cache.get_or_begin(sys.argv[2], None, None), flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


@pytest.mark.process
def test_process_that_is_killed_while_it_reads_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_OTHERS_S", 3600.0)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), URL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "(None, True)\n"

        async def run() -> None:
            cache = Cache(tmp_path, LARGE, data_set="one")
            waiting = asyncio.ensure_future(cache.get_or_begin(URL, None, None))
            assert await cache.get_or_begin(f"{URL}/2", None, None) == (None, True)
            cache.end(f"{URL}/2", None, None)
            assert not waiting.done()
            holder.kill()
            assert await waiting == (None, True)
            cache.end(URL, None, None)
            await cache.aclose()

        asyncio.run(run())
