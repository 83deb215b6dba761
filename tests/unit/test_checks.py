"""Bytes that fail their checks, and what a reader caches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace._util.context import running_charge
from headrace._util.reads import crc32c_of
from headrace.errors import BadResponseError, ChecksumError, LoaderClosedError, ObjectChangedError, ShortReadError
from headrace.fetch import Reader
from headrace.fetch.range_request import RangeRequest
from headrace.options import Fetch
from headrace.types import Answer

BODY = bytes(range(256)) * 40
FLIPPED = b"\xff" + BODY[1:]

on_a_loop = pytest.mark.asyncio


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
