"""Every read gets its own bytes or its own error, however few or many the requests are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.context import running_charge
from headrace.errors import ObjectChangedError, StorageError, ThrottledError
from headrace.fetch import Reader
from headrace.fetch.coalescer import split
from headrace.options import Fetch
from headrace.types import Answer, Buffer

URL = "shelf://object"
PART = 512
OPTIONS = Fetch(range_bytes=PART, gap_bytes=50, attempts=1)
BODY = b"".join(n.to_bytes(2, "big") for n in range(4_000))
Range = tuple[int | None, int | None]

pytestmark = pytest.mark.asyncio


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Shelf:
    """A store with one object, and the stores of a reader at once; an answer takes four turns of the loop.

    Attributes:
        asked: the ranges that were asked for.
        most_at_once: how many requests were under way together, at most.
        given: bytes of bodies that were taken.
    """

    def __init__(self, body: bytes = BODY, *, etag: str | None = '"1"', gives_ranges: bool = True) -> None:
        self.body, self.etag, self.gives_ranges = body, etag, gives_ranges
        self.failure: Exception | None = None
        self.asked: list[Range] = []
        self.most_at_once = self._under_way = self.given = 0

    def of(self, url: str) -> tuple[Shelf, str]:
        assert url == URL
        return self, ""

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        self.asked.append((start, stop))
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            await turns(4)
        except asyncio.CancelledError:
            await turns(4)  # as a connection that is closed
            raise
        finally:
            self._under_way -= 1
        if self.failure is not None:
            raise self.failure
        if if_match not in (None, self.etag):
            raise ObjectChangedError("the object changed", url=URL)
        size = len(self.body)
        first = min(start or 0, size)
        last = size if stop is None else min(stop, size)
        return Answer(first, last, size, self.etag, self._pieces(first, last), self.gives_ranges)

    async def aclose(self) -> None:
        pass

    async def _pieces(self, start: int, stop: int) -> AsyncIterator[Buffer]:
        for begin, end in split(start, stop, 300):
            self.given += end - begin
            yield self.body[begin:end]


def reader_of(shelf: Shelf) -> Reader:
    return Reader(OPTIONS, concurrency=64, stores=shelf)  # type: ignore[arg-type]


async def read_all(reader: Reader, ranges: Sequence[Range]) -> list[Any]:
    return await asyncio.gather(*(reader.read(URL, *range_) for range_ in ranges), return_exceptions=True)


@pytest.mark.parametrize(("ranges", "requests"), [
    ([(7, 9)], [(7, 9)]),
    ([(0, 100), (100, 200), (200, 300)], [(0, 300)]),
    ([(200, 300), (0, 100), (250, 400), (0, 100), (130, 200)], [(0, 400)]),
    ([(0, 100), (300, 400)], [(0, 100), (300, 400)]),
    ([(0, 512), (512, 1024), (5, 10)], [(0, 512), (512, 1024)]),
    ([(None, 100), (100, 200)], [(0, 200)]),
    ([(7_900, 8_100), (8_100, 8_300), (9_000, 9_100)], [(7_900, 8_300), (9_000, 9_100)]),
])  # fmt: skip
async def test_ranges_of_one_turn_are_coalesced_within_the_bounds(ranges: list[Range], requests: list[Range]) -> None:
    shelf = Shelf()
    async with reader_of(shelf) as reader:
        assert await read_all(reader, ranges) == [BODY[start:stop] for start, stop in ranges]
        assert sorted(shelf.asked) == requests
        assert reader.meter.coalesced == len(ranges) - len(requests)


@pytest.mark.parametrize(("size", "range_", "gives_ranges", "requests"), [
    (8_000, (0, 1024), True, [(0, 1024)]),
    (8_000, (0, 1025), True, [(0, 1024), (1024, 1025)]),
    (8_000, (6_900, 9_000), True, [(6_900, 7_924), (7_924, 8_000)]),
    (8_000, (7_000, None), True, [(7_000, 8_024)]),
    (8_000, (5, None), False, [(5, 1029), *split(1029, 8_000, 1743)]),
    (8_000, (9_000, None), True, [(9_000, 10_024)]),
    (8_000, (None, None), True, [(None, None), *split(1024, 8_000, 1744)]),
    (8_000, (0, None), True, [(None, None), *split(1024, 8_000, 1744)]),
    (16_000, (None, None), True, [(None, None), *split(1024, 16_000, 4 * PART)]),
    (2_100, (None, None), True, [(None, None), *split(1024, 2_100, PART)]),
    (8_000, (None, None), False, [(None, None)]),
    (1_024, (None, None), True, [(None, None)]),
    (0, (None, None), True, [(None, None)]),
])  # fmt: skip
async def test_long_read_is_split(size: int, range_: Range, gives_ranges: bool, requests: list[Range]) -> None:
    shelf = Shelf((BODY * 2)[:size], gives_ranges=gives_ranges)
    async with reader_of(shelf) as reader:
        assert await reader.read(URL, *range_) == shelf.body[slice(*range_)]
    assert shelf.asked == requests
    assert shelf.most_at_once == max(1, min(4, len(requests) - 1))
    assert shelf.given < size + 300


@given(st.lists(st.tuples(st.none() | st.integers(0, 9_000), st.none() | st.integers(0, 2_000)), max_size=12))
async def test_reads_return_the_bytes_of_their_ranges(lengths: list[Range]) -> None:
    ranges = [(start, None if length is None else (start or 0) + length) for start, length in lengths]
    async with reader_of(Shelf()) as reader:
        assert await read_all(reader, ranges) == [BODY[start:stop] for start, stop in ranges]


@pytest.mark.parametrize("ranges", [[(0, 10), (10, 30), (10, 30)], [(5, 9)], [(None, None)], [(3, 2_000)]])
async def test_failed_request_raises_an_error_with_its_range_in_each_read(ranges: list[Range]) -> None:
    shelf = Shelf()
    shelf.failure = ThrottledError("slow down", url=URL, status=503, retry_after_s=7.0)
    async with reader_of(shelf) as reader:
        errors = await read_all(reader, ranges)
    assert [(type(e), e.start, e.stop, e.status, e.retry_after_s) for e in errors] == [
        (ThrottledError, *range_, 503, 7.0) for range_ in ranges
    ]
    assert len({id(error) for error in errors}) == len(ranges)
    assert len(shelf.asked) == 1


@pytest.mark.parametrize(("before", "after", "size"), [('"1"', '"2"', 8_000), (None, None, 7_000)])
async def test_long_read_is_of_one_version_or_an_error(before: str | None, after: str | None, size: int) -> None:
    class Replaced(Shelf):
        async def get(self, *args: Any, **kwargs: Any) -> Answer:
            if len(self.asked) == 3:
                self.body, self.etag = bytes(size), after
            return await super().get(*args, **kwargs)

    async with reader_of(Replaced(etag=before)) as reader:
        with pytest.raises(ObjectChangedError, match="the object changed") as caught:
            await reader.read(URL)
    assert (caught.value.start, caught.value.stop) == (None, None)


@pytest.mark.parametrize("count", range(9))
async def test_request_ends_with_its_last_reader(count: int) -> None:
    shelf = Shelf()
    async with reader_of(shelf) as reader:
        for doomed in ([0], [1], [0, 1], [0, 1, 2]):
            reads = [asyncio.ensure_future(reader.read(URL, at, at + 100)) for at in (0, 100, 200)]
            await turns(count)
            for k in doomed:
                reads[k].cancel()
            results = await asyncio.gather(*reads, return_exceptions=True)
            assert reader.meter.in_flight == 0
            assert len(asyncio.all_tasks()) == 1
            for k, result in enumerate(results):
                is_cancelled = k in doomed and isinstance(result, asyncio.CancelledError)
                assert is_cancelled or result == BODY[k * 100 : k * 100 + 100]
            assert await reader.read(URL, 5, 10) == BODY[5:10]
            assert shelf.asked[-1] == (5, 10)


async def test_read_cancelled_just_after_its_request_began_leaves_the_request_to_others() -> None:
    async def cancel() -> None:
        await turns(1)
        second.cancel()

    shelf = Shelf()
    async with reader_of(shelf) as reader:
        first = asyncio.ensure_future(reader.read(URL, 0, 100))
        cancelling = asyncio.ensure_future(cancel())
        second = asyncio.ensure_future(reader.read(URL, 100, 200))
        await cancelling
        first.cancel()
        await asyncio.wait([first, second])
        assert len(asyncio.all_tasks()) == 1
    assert shelf.asked == [(0, 200)]


async def test_each_read_is_charged_for_its_own_bytes() -> None:
    for ranges, charges in (
        ([(0, 100), (100, 300), (7_950, 8_100)], [50, 100, 200]),
        ([(None, None)], [1024, 6976]),
        ([(10, 20)], [10]),
    ):
        charged: list[int] = []

        async def charge(nbytes: int, charged: list[int] = charged) -> None:
            charged.append(nbytes)

        running_charge.set(charge)
        async with reader_of(Shelf()) as reader:
            await read_all(reader, ranges)
        assert sorted(charged) == charges


async def test_announced_size_beyond_memory_is_a_storage_error() -> None:
    class Liar(Shelf):
        async def get(self, *args: Any, **kwargs: Any) -> Answer:
            answer = await super().get(*args, **kwargs)
            stop = 2**62 if answer.stop == 8_000 else answer.stop
            return Answer(answer.start, stop, 2**62, None, answer.chunks, True)

    async with reader_of(Liar()) as reader:
        with pytest.raises(StorageError, match="memory does not hold"):
            await reader.read(URL)
