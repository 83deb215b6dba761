"""Ranges that are requested, bytes that fail their checks, what a reader caches, and blocking calls in own threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.context import running_charge
from headrace._util.reads import crc32c_of
from headrace._util.sample_ranges import Rows
from headrace.errors import (
    BadResponseError,
    ChecksumError,
    LoaderClosedError,
    ObjectChangedError,
    ObjectMissingError,
    ShortReadError,
)
from headrace.fetch import Reader
from headrace.fetch.coalescer import coalesce, member_requests, span_of
from headrace.fetch.range_request import RangeRequest
from headrace.fetch.stores.local import LocalStore, _File, answer_from
from headrace.fetch.threads import Threads
from headrace.options import Fetch
from headrace.types import Answer, Fills

LONG = bytes(range(256)) * 4096


on_a_loop = pytest.mark.asyncio


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("under-test", 2)
    yield threads
    threads.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "long"
    path.write_bytes(LONG)
    return path


def alive() -> int:
    return sum(thread.name == "under-test" for thread in threading.enumerate())


@on_a_loop
async def test_results_and_errors_go_to_the_callers(threads: Threads) -> None:
    results = await asyncio.gather(*(threads.call(divmod, 6, n) for n in (1, 2, 0, 4)), return_exceptions=True)
    assert isinstance(results.pop(2), ZeroDivisionError)
    assert results == [(6, 0), (3, 0), (1, 2)]
    with pytest.raises(RuntimeError, match="StopIteration"):  # which no future takes
        await threads.call(next, iter(()))


@on_a_loop
async def test_threads_are_started_as_calls_need_them(threads: Threads) -> None:
    assert alive() == 0
    for _ in range(3):
        await threads.call(int)
    assert alive() == 1
    both = threading.Barrier(2)
    await asyncio.gather(*(threads.call(both.wait, 5) for _ in range(2)))
    await asyncio.gather(*(threads.call(int) for _ in range(10)))
    assert alive() == 2


@on_a_loop
async def test_cancelled_calls_and_calls_of_closed_threads_do_not_run(threads: Threads) -> None:
    blocked, done = threading.Event(), []
    first = [threads.call(blocked.wait, 5) for _ in range(2)]
    threads.call(done.append, 1).cancel()
    blocked.set()
    await asyncio.gather(*first, threads.call(done.append, 2))
    assert done == [2]
    threads.close()
    with pytest.raises(RuntimeError, match="under-test"):
        threads.call(int)


@pytest.mark.process
def test_blocked_call_does_not_delay_program_exit() -> None:
    code = """
import asyncio, threading
from headrace.fetch.threads import Threads
async def main():
    threads = Threads("stuck", 1)
    call = threads.call(threading.Event().wait)
    await asyncio.sleep(0)
    threads.close()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@on_a_loop
async def test_long_range_is_read_in_pieces_of_any_size(file: Path) -> None:
    store = LocalStore()
    for sizes in ([len(LONG)], [1, 300_000, 700_000, len(LONG)], [100]):
        answer = await store.get(str(file), 5, 1_000_005)
        body, got = answer.chunks, b""
        assert isinstance(body, Fills)
        for size in sizes:
            target = bytearray(size)
            got += target[: await body.read_into(memoryview(target))]
            assert body.received == len(got)
        assert got == LONG[5:1_000_005][: sum(sizes)]
    await store.aclose()


def shorten(file: Path) -> None:
    file.write_bytes(LONG[:10])


def replace(file: Path) -> None:
    other = file.with_name("other")
    shutil.copy2(file, other)
    other.replace(file)


@pytest.mark.parametrize(("change", "error", "why"), [
    (shorten, ObjectChangedError, None),
    (Path.unlink, ObjectMissingError, None),
    (replace, ObjectChangedError, "another has come in its place"),
])  # fmt: skip
@on_a_loop
async def test_file_that_changes_during_a_read_is_an_error(
    change: Callable[[Path], None], error: type[Exception], why: str | None, file: Path
) -> None:
    store = LocalStore()
    answer = await store.get(str(file))
    change(file)
    with pytest.raises(error, match=why):
        await anext(answer.chunks)
    if change is replace:
        again = await store.get(str(file), 5, 10, if_match=answer.etag)
        assert await anext(again.chunks) == LONG[5:10]
    await store.aclose()


@on_a_loop
async def test_cancelled_read_writes_no_more_into_the_readers_memory(file: Path, threads: Threads) -> None:
    stuck, go_on, visits = threading.Event(), threading.Event(), iter((False, True))

    def opened(if_match: str | None) -> tuple[int, int, str]:
        if next(visits):
            stuck.set()
            go_on.wait(10)
        return local.open(if_match)

    local = _File(str(file))
    answer = await answer_from(threads, opened, None, None, None)
    assert isinstance(answer.chunks, Fills)
    target = bytearray(len(LONG))
    read = asyncio.ensure_future(answer.chunks.read_into(memoryview(target)))
    await asyncio.to_thread(stuck.wait, 10)
    read.cancel()
    await asyncio.wait([read])
    assert read.cancelled()
    go_on.set()
    both = threading.Barrier(2)  # both threads are free again
    await asyncio.gather(*(threads.call(both.wait, 10) for _ in range(2)))
    assert not any(target)


@pytest.mark.process
@on_a_loop
async def test_pipe_socket_and_device_are_refused_and_block_no_thread(tmp_path: Path, file: Path) -> None:
    pipes = [str(tmp_path / f"fifo{n}") for n in range(20)]
    for pipe in pipes:
        os.mkfifo(pipe)
    store = LocalStore()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (*pipes, "/dev/null"):
            with pytest.raises(ObjectMissingError, match="a pipe, a socket or a device"):
                await store.get(path, 0, 10)
        with pytest.raises((ObjectMissingError, OSError)):
            await store.get(str(tmp_path / "socket"), 0, 10)
    answer = await store.get(str(file), 5, 10)
    assert await anext(answer.chunks) == LONG[5:10]
    await store.aclose()


BODY = bytes(range(256)) * 40
FLIPPED = b"\xff" + BODY[1:]


class Bodies:
    """A store and its registry of addresses. Each answer is the next body.

    Attributes:
        asked: the ranges of the requests.
    """

    def __init__(self, *bodies: bytes) -> None:
        self.bodies, self.asked = iter(bodies), list[tuple[int | None, int | None]]()

    def of(self, url: str) -> tuple[Bodies, str]:
        return self, url

    async def get(self, path: str, start: int | None = None, stop: int | None = None, **_: object) -> Answer:
        self.asked.append((start, stop))
        body = next(self.bodies)[start or 0 : stop]
        return answer(start or 0, (start or 0) + len(body), len(BODY), chunks=pieces(body))

    async def aclose(self) -> None:
        pass


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    yield body


def answer(
    start: int, stop: int | None, size: int | None, etag: str | None = '"v"', *, chunks: object = None
) -> Answer:
    return Answer(start, stop, size, etag, chunks)  # type: ignore[arg-type]


def reader_of(store: Bodies, **options: object) -> Reader:
    return Reader(Fetch(**options), concurrency=2, stores=store)  # type: ignore[arg-type]


def is_right(data: bytes | bytearray | memoryview) -> bool:
    return bytes(data) == BODY[100 : 100 + len(data)]


SHIFTED = BODY[:100] + FLIPPED


@on_a_loop
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(("bodies", "requests"), [([BODY], 1), ([SHIFTED, BODY], 2), ([SHIFTED, SHIFTED], 2)])
async def test_bytes_that_fail_their_checksum_are_read_again(bodies: list[bytes], requests: int, into: bool) -> None:
    store, target = Bodies(*bodies), bytearray(50)
    is_error = bodies[-1] is SHIFTED
    error = pytest.raises(ChecksumError, match="bytes 100 to 150; 2 attempts")
    async with reader_of(store) as reader:
        with error if is_error else contextlib.nullcontext():
            if into:
                await reader.read_into("x", 100, memoryview(target), check=is_right)
            else:
                target[:] = await reader.read("x", 100, 150, check=is_right)
    assert is_error or target == BODY[100:150]
    assert len(store.asked) == requests


@pytest.mark.parametrize(("data", "value"), [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (bytes([0xFF]) * 32, 0x62A8AB43),
])  # fmt: skip
def test_crc32c_equals_the_examples_of_rfc_3720(data: bytes, value: int) -> None:
    assert crc32c_of(memoryview(data)) == value


@on_a_loop
async def test_cached_bytes_are_checked_again(tmp_path: Path) -> None:
    async with reader_of(Bodies(BODY, BODY), cache_dir=tmp_path) as reader:
        assert await reader.read("http://h/x", 0, 50) == BODY[:50]
        target = bytearray(70)
        span = await reader.read_into("http://h/x", 5, memoryview(target))
    store = Bodies(FLIPPED)
    async with reader_of(store, cache_dir=tmp_path) as reader:
        assert await reader.read("http://h/x", 0, 50) == BODY[:50]
        again = bytearray(70)
        kept = await reader.read_into("http://h/x", 5, memoryview(again), etag='"v"')
        assert kept == span._replace(reported=None)  # not part of the cache
        assert again == target == BODY[5:75]
        assert store.asked == []
        assert await reader.read("http://h/x", 0, 50, check=lambda data: bytes(data) != BODY[:50]) == FLIPPED[:50]
    with pytest.raises(LoaderClosedError):
        await reader.read("http://h/x", 0, 50)


@pytest.mark.parametrize(("start", "stop", "given", "is_accepted"), [
    (None, None, answer(0, 10, 10), True),
    (None, None, answer(0, None, None), True),
    (5, None, answer(5, 10, 10), True),
    (5, 20, answer(5, 10, 10), True),
    (5, 8, answer(5, 8, None), True),
    (50, 60, answer(10, 10, 10), True),
    (0, 8, answer(0, None, None), True),
    (None, None, answer(1, 10, 10), False),
    (5, 8, answer(5, 7, 10), False),
    (5, 8, answer(5, 9, 10), False),
    (5, 8, answer(0, 10, 10), False),
    (5, 8, answer(5, 7, None), False),
    (5, None, answer(0, None, None), False),
    (50, 60, answer(50, 60, 10), False),
])  # fmt: skip
def test_other_range_is_refused(start: int | None, stop: int | None, given: Answer, is_accepted: bool) -> None:
    with contextlib.nullcontext() if is_accepted else pytest.raises(BadResponseError):
        RangeRequest("x", start, stop).accept(given)


@pytest.mark.parametrize(("etag", "second", "kind"), [
    ('"v"', answer(0, 10, 10, '"w"'), ObjectChangedError),
    (None, answer(0, 11, 11, None), ObjectChangedError),
    ('"v"', answer(0, 11, 11), BadResponseError),
])  # fmt: skip
def test_answer_of_another_version_is_refused(etag: str | None, second: Answer, kind: type[Exception]) -> None:
    request = RangeRequest("x", None, None)
    request.accept(answer(0, 10, 10, etag))
    with pytest.raises(kind):
        request.accept(second)


def test_unknown_length_is_known_at_the_end_of_the_body() -> None:
    request = RangeRequest("x", 0, 8)
    request.accept(answer(0, None, None))
    with pytest.raises(BadResponseError, match="the size"):
        request.span()
    request.check_end()
    assert request.span().size == 0


@on_a_loop
@pytest.mark.parametrize(("given", "asked"), [(50, [(0, 50)]), (49, [(0, 50), (49, 50)])])
async def test_retry_requests_only_missing_bytes(given: int, asked: list[tuple[int, int]]) -> None:
    class Cut(Bodies):
        """The first body fills `given` bytes and then raises."""

        received = 0

        async def get(self, *where: Any, **options: object) -> Answer:
            found = await super().get(*where, **options)
            return found if len(self.asked) > 1 else answer(0, 50, len(BODY), chunks=self)

        async def read_into(self, target: memoryview) -> int:
            target[:given] = BODY[:given]
            self.received = given
            raise ShortReadError("the connection ended within the body", url="x")

    store = Cut(BODY, BODY)
    async with reader_of(store, backoff_s=0.0) as reader:
        assert await reader.read("x", 0, 50) == BODY[:50]
    assert store.asked == asked


@on_a_loop
async def test_body_of_unknown_length_is_charged_at_its_end() -> None:
    class WithoutLength(Bodies):
        async def get(self, *args: object, **options: object) -> Answer:
            return answer(0, None, None, None, chunks=pieces(BODY))

    charged: list[int] = []
    running_charge.set(charged.append)  # type: ignore[arg-type]
    async with reader_of(WithoutLength()) as reader:
        assert await reader.read("x") == BODY
    assert charged == [len(BODY)]


Ranges = list[tuple[int, int]]


def chained(steps: Ranges) -> Ranges:
    begins = itertools.accumulate(step for step, _ in steps)
    return [(start, start + length) for start, (_, length) in zip(begins, steps, strict=True)]


RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=15).map(chained)
LONGEST = st.sampled_from([1, 4, 10, 20, 1000])
WASTE = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
BOUNDS = st.fixed_dictionaries({"gap": st.integers(0, 8), "waste": WASTE, "longest": LONGEST})


def requests_for(ranges: Ranges, **bounds: Any) -> Ranges:
    return [span_of(ranges, group) for group in coalesce(ranges, **bounds)]


@given(RANGES, BOUNDS)
def test_requests_hold_every_range_whole_and_keep_every_bound(ranges: Ranges, bounds: dict[str, Any]) -> None:
    groups, requests = coalesce(ranges, **bounds), requests_for(ranges, **bounds)
    assert sorted(k for group in groups for k in group) == list(range(len(ranges)))
    assert requests == sorted(requests)
    for group, (begin, end) in zip(groups, requests, strict=True):
        members = [ranges[k] for k in group]
        assert (min(start for start, _ in members), max(stop for _, stop in members)) == (begin, end)
        wanted = {byte for start, stop in members for byte in range(start, stop)}
        assert end - begin - len(wanted) <= bounds["waste"] * (end - begin)
        assert end - begin <= max(bounds["longest"], *(stop - start for start, stop in members))
        assert np.diff(sorted(wanted)).max(initial=1) <= bounds["gap"] + 1


@given(RANGES, st.integers(0, 8), LONGEST)
def test_coalesced_requests_are_stable(ranges: Ranges, gap: int, longest: int) -> None:
    requests = requests_for(ranges, gap=gap, longest=longest)
    assert requests_for(requests, gap=gap, longest=longest) == requests


@pytest.mark.parametrize(("is_wanted", "requests"), [
    (lambda row: row % 10 != 3, [(0, 4_000_000)]),  # most of the object: one stream
    (lambda row: row % 50 == 0, [(row * 4000, row * 4000 + 4000) for row in range(0, 1000, 50)]),
    (lambda row: row < 100 or row >= 900, [(0, 400_000), (3_600_000, 4_000_000)]),
])  # fmt: skip
def test_rows_of_a_shard_are_one_stream_or_ranges_by_what_another_request_costs(
    is_wanted: Callable[[int], bool], requests: Ranges
) -> None:
    rows = [(row * 4000, row * 4000 + 4000) for row in range(1000) if is_wanted(row)]
    assert requests_for(rows, gap=100_000, waste=0.25, longest=2**40) == requests


BLOCK = 512
HEADERS = 4 * BLOCK  # that a member may have, extended ones too
MANY = 10**9

# (size, number of other blocks before its header)
MEMBERS = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 511, 512, 513, 2000, 9000]), st.sampled_from([0, 0, 0, 1, 2, 5, 30])),
    max_size=20,
)


def rows_of(members: list[tuple[int, int]]) -> Rows:
    offsets, at = [], 0
    for size, skipped in members:
        at += (skipped + 1) * BLOCK
        offsets.append(at)
        at += -(-size // BLOCK) * BLOCK
    count = len(members)
    sizes = np.array([size for size, _ in members], np.int64)
    offset = np.array(offsets, np.int64)
    keys = np.array([b"%d" % n for n in range(count)] or [], "S8")
    return Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offset, sizes, ("a",))


@given(members=MEMBERS, gap=st.sampled_from([0, 511, 1024, 16384]), longest=st.sampled_from([512, 1024, 4096, MANY]))
def test_requests_hold_each_member_whole_and_keep_every_bound(
    members: list[tuple[int, int]], gap: int, longest: int
) -> None:
    rows = rows_of(members)
    starts, stops, number = member_requests(rows, gap=gap, longest=longest)
    ends = rows.offset + rows.size
    assert (starts[1:] > stops[:-1]).all()
    for m in np.flatnonzero(number >= 0):
        assert starts[number[m]] <= rows.offset[m]
        assert ends[m] <= stops[number[m]]
    for k, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        inside = np.flatnonzero((number == k) & (rows.size > 0))
        assert len(inside)
        assert stop - start <= max(longest, int(rows.size[inside].max()))
        holes = rows.offset[inside][1:] - ends[inside][:-1]
        has_empty = ((rows.offset >= start) & (rows.offset <= stop) & (rows.size == 0)).any()  # these are in holes
        assert has_empty or (holes <= max(gap, HEADERS)).all()
    assert (number[rows.size > 0] >= 0).all()


@pytest.mark.parametrize("longest", [512, 10_000, 100_000])
def test_complete_shards_are_read_as_streams(longest: int) -> None:
    rows = rows_of([(700, 0), (3, 0)] * 200)
    starts, stops, _ = member_requests(rows, gap=0, longest=longest)
    covered = int((stops - starts).sum())
    end = int(rows.offset[-1] + rows.size[-1])
    assert covered <= end - BLOCK
    assert len(starts) == 400 if longest == 512 else len(starts) <= -(-end // (longest - 2560))


def test_neighbours_are_one_request_including_headers_between_them() -> None:
    rows = rows_of([(1, 0), (0, 0), (1, 0), (0, 0)])
    starts, stops, number = member_requests(rows, gap=0, longest=MANY)
    assert (starts.tolist(), number.tolist()) == ([512], [0, 0, 0, 0])
    assert stops.tolist() == [rows.offset[3]]


APART = [(4000, 0), (4000, 6), (100, 9)]


@pytest.mark.parametrize(("members", "gap", "count"), [
    *((APART, blocks * BLOCK, count) for blocks, count in ((0, 3), (6, 3), (8, 2), (11, 1))),
    ([(700, 2)] * 400, 0, 1),  # extended headers: each has two more blocks before its header
    ([(0, 0), (0, 0), (0, 9)], MANY, 0),  # members without bytes
])  # fmt: skip
def test_wide_gaps_separate_requests(members: list[tuple[int, int]], gap: int, count: int) -> None:
    starts, stops, number = member_requests(rows_of(members), gap=gap, longest=MANY)
    assert len(starts) == len(stops) == count
    assert count or number.tolist() == [-1] * len(members)
