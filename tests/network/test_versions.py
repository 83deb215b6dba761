"""Bytes of two versions of an object are never joined."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from network.bodies import numbered
from network.scripted import Reply, part, serving

from headrace._util.reads import ReportedVersion, lasting
from headrace.errors import ObjectChangedError, StorageError
from headrace.fetch import Reader
from headrace.options import Fetch

BODY = numbered(300_000)
OTHER = BODY[::-1]
HALF = 150_000
MONDAY, TUESDAY = "Last-Modified: Mon, 01 Jan 2035 00:00:00 GMT", "Last-Modified: Tue, 02 Jan 2035 00:00:00 GMT"
A, B = 'ETag: "a"', 'ETag: "b"'
QUICK = Fetch(backoff_s=0.0, hedge_share=0, attempts=4)
OBSTORE = {"client_options": {"http1_only": True}}

SAME = [((), ()), ((A,), (A,)), ((MONDAY,), (MONDAY,)), ((A, MONDAY), (A,)), ((A, MONDAY), (A, TUESDAY))]
CHANGED = [
    *(((A,), (B,)), ((MONDAY,), (TUESDAY,)), ((A, MONDAY), (TUESDAY,)), ((MONDAY,), (B, TUESDAY))),
    *(((A,), ()), ((MONDAY,), ()), ((A,), (MONDAY,)), ((MONDAY,), (A,)), ((A, MONDAY), (MONDAY,))),
    *(((), (A,)), ((), (MONDAY,))),
]


def outcomes() -> list[tuple[Sequence[str], Sequence[str], type[StorageError] | None]]:
    return [(*fields, error) for pairs, error in ((SAME, None), (CHANGED, ObjectChangedError)) for fields in pairs]


@pytest.mark.asyncio
@pytest.mark.parametrize(("before", "after", "error"), outcomes())
async def test_range_continues_with_the_same_version(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None
) -> None:
    whole = part(BODY, 0, len(BODY), *before)
    cut = Reply(whole[: len(whole) - HALF], "end")
    rest = part((BODY if error is None else OTHER)[HALF:], HALF, len(BODY), *after)
    async with serving(cut, rest) as server, Reader(QUICK, concurrency=2) as reader:
        if error is None:
            assert await reader.read(server.url, 0, len(BODY)) == BODY
            return
        with pytest.raises(error):
            await reader.read(server.url, 0, len(BODY))


@pytest.mark.asyncio
@pytest.mark.parametrize("slips", [1, 2])
async def test_answer_without_a_version_is_asked_for_once_more(slips: int) -> None:
    whole, rest = part(BODY, 0, len(BODY), A), part(BODY[HALF:], HALF, len(BODY), A)
    page = part(BODY[HALF:], HALF, len(BODY))
    async with (
        serving(Reply(whole[: len(whole) - HALF], "end"), *[page] * slips, rest) as server,
        Reader(QUICK, concurrency=2) as reader,
    ):
        if slips == 1:
            assert await reader.read(server.url, 0, len(BODY)) == BODY
            return
        with pytest.raises(ObjectChangedError, match="now it has none"):
            await reader.read(server.url, 0, len(BODY))


@pytest.mark.asyncio
@pytest.mark.parametrize(("before", "after", "error"), outcomes())
async def test_range_has_one_version(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None
) -> None:
    size = 80 * 512
    first = part(BODY[: 2 * size], 0, 3 * size, *before)
    last = part((BODY if error is None else OTHER)[2 * size : 3 * size], 2 * size, 3 * size, *after)
    short = Fetch(range_bytes=size, backoff_s=0.0, hedge_share=0, attempts=4)
    async with serving(first, last) as server, Reader(short, concurrency=1) as reader:
        if error is None:
            assert await reader.read(server.url, 0, 3 * size) == BODY[: 3 * size]
            return
        with pytest.raises((error, ExceptionGroup)) as raised:
            await reader.read(server.url, 0, 3 * size)
        assert isinstance(raised.value, error) or raised.group_contains(error)


@pytest.mark.asyncio
@pytest.mark.parametrize(("before", "after", "error"), [one for one in outcomes() if one[0]])
async def test_next_read_of_an_object_is_of_the_version_that_the_first_was(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None, tmp_path: Path
) -> None:
    """As formats read a table at the end, and then what it points to."""
    cached = Fetch(backoff_s=0.0, hedge_share=0, attempts=4, cache_dir=tmp_path)
    for options, storage in ((QUICK, None), (cached, None), (QUICK, OBSTORE)):
        answers = [part(BODY[:10], 0, 100, *before), part(BODY[10:20], 10, 100, *after)]
        async with serving(*answers) as server, Reader(options, concurrency=2, storage_options=storage) as reader:
            room = memoryview(bytearray(10))
            span = await reader.read_into(server.url, 0, room)
            if error is None:
                await reader.read_into(server.url, 10, room, etag=span.etag)
                assert bytes(room) == BODY[10:20]
            else:
                with pytest.raises(error):
                    await reader.read_into(server.url, 10, room, etag=span.etag)
            assert len(server.requests) >= 2


def test_indexes_keep_no_version_that_is_made_of_a_date() -> None:
    assert lasting(ReportedVersion(modified="x").version) is None
    assert lasting(ReportedVersion(etag="x").version) == "x"
