"""Bytes of two versions of an object are never joined."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from end_to_end.tars import numbered_samples, tar
from network.bodies import numbered
from network.scripted import Reply, part, serving

import headrace as hr
from headrace._util.reads import ReportedVersion, lasting
from headrace.errors import ObjectChangedError, StorageError
from headrace.fetch import Reader
from headrace.options import FetchOptions

BODY = numbered(300_000)
OTHER = BODY[::-1]
HALF = 150_000
MONDAY, TUESDAY = "Last-Modified: Mon, 01 Jan 2035 00:00:00 GMT", "Last-Modified: Tue, 02 Jan 2035 00:00:00 GMT"
A, B = 'ETag: "a"', 'ETag: "b"'
QUICK = FetchOptions(backoff_s=0.0, hedge_share=0, attempts=4)
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
async def test_range_goes_on_behind_a_lost_connection_with_the_same_version_alone(
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
async def test_parts_of_a_long_range_are_of_one_version(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None
) -> None:
    size = 80 * 512
    first = part(BODY[: 2 * size], 0, 3 * size, *before)
    last = part((BODY if error is None else OTHER)[2 * size : 3 * size], 2 * size, 3 * size, *after)
    short = FetchOptions(range_bytes=size, backoff_s=0.0, hedge_share=0, attempts=4)
    async with serving(first, last) as server, Reader(short, concurrency=1) as reader:
        if error is None:
            assert await reader.read(server.url, 0, 3 * size) == BODY[: 3 * size]
            return
        with pytest.raises((error, ExceptionGroup)) as raised:
            await reader.read(server.url, 0, 3 * size)
        assert isinstance(raised.value, error) or raised.group_contains(error)


class WithDates(BaseHTTPRequestHandler):
    """Ranges of a shard, without an ETag; from the third answer on it was modified on another day, if there is one."""

    protocol_version = "HTTP/1.1"
    shard = tar(numbered_samples(0, 40, size=20_000))
    days: tuple[str, str]
    count = 0

    def do_GET(self) -> None:
        found = re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        first, last = int(found[1]), min(int(found[2]), len(self.shard) - 1)
        type(self).count += 1
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.shard)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Last-Modified", self.days[self.count > 2].partition(": ")[2])
        self.end_headers()
        self.wfile.write(self.shard[first : last + 1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("days", [(MONDAY, MONDAY), (MONDAY, TUESDAY)])
def test_ranges_of_a_shard_are_of_one_version(days: tuple[str, str]) -> None:
    class Handler(WithDates):
        pass

    Handler.days = days
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serves = threading.Thread(target=server.serve_forever)
        serves.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a.tar"
        fetch = FetchOptions(range_bytes=64 * 1024, backoff_s=0.0, hedge_share=0)
        keys: list[str] = []
        try:
            data = hr.stream([url], index=None).to_tuple("__key__")
            with hr.DataLoader(data, batch_size=1, fetch=fetch, memory_budget=2**20) as loader:
                if days[0] == days[1]:
                    keys += [batch[0][0] for batch in loader]
                    assert keys == [f"{n:06d}" for n in range(40)]
                else:
                    with pytest.raises(ObjectChangedError, match="last modified Mon, 01 Jan 2035"):
                        keys += [batch[0][0] for batch in loader]
        finally:
            server.shutdown()
            serves.join()
        assert Handler.count >= 3


@pytest.mark.asyncio
@pytest.mark.parametrize(("before", "after", "error"), [one for one in outcomes() if one[0]])
async def test_next_read_of_an_object_is_of_the_version_that_the_first_was(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None, tmp_path: Path
) -> None:
    """As formats read a table at the end, and then what it points to."""
    cached = FetchOptions(backoff_s=0.0, hedge_share=0, attempts=4, cache_dir=tmp_path)
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
