"""A read is byte-exact and of one version, or the one right error, whatever a server does."""

import asyncio
import itertools
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network.bodies import OBSTORE_KEEPS, numbered
from network.scripted import Reply, part, serving

from headrace._util.context import running_reader
from headrace._util.reads import ReportedVersion, lasting
from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    LoaderClosedError,
    ObjectChangedError,
    ObjectMissingError,
    OptionError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
    ThrottledError,
)
from headrace.fetch import Meter, Reader
from headrace.fetch.stores import memory
from headrace.options import Fetch
from headrace.sources.reading import read
from headrace.testing import FaultServer

BODY = numbered(900_000)
SMALL = numbered(83_000)
OPTIONS = Fetch(attempts=4, first_byte_timeout_s=0.3, stall_timeout_s=0.3, total_timeout_s=20, backoff_s=0.0)

pytestmark = [OBSTORE_KEEPS, pytest.mark.asyncio]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(seed=5) as running:
        yield running


def reader_with(**changes: Any) -> Reader:
    concurrency = changes.pop("concurrency", 4)
    return Reader(changes.pop("options", OPTIONS), concurrency=concurrency, **changes)


async def test_end_is_one_request(server: FaultServer) -> None:
    url, empty = server.add("end", BODY), server.add("empty-end", b"")
    target = memoryview(bytearray(1000))
    async with reader_with() as reader:
        span = await reader.read_into(url, -900, target)
        assert (span.start, span.stop, span.size) == (len(BODY) - 900, len(BODY), len(BODY))
        assert target[:900] == BODY[-900:]
        assert [request.range for request in server.requests_for("end")] == ["bytes=-900"]
        with pytest.raises(ObjectChangedError):
            await reader.read_into(url, -900, target, etag='"other"')
        span = await reader.read_into(empty, -900, target)
        assert (span.start, span.stop, span.size) == (0, 0, 0)
        with pytest.raises(OptionError, match="start=-1001"):
            await reader.read_into(url, -1001, target)
        with pytest.raises(ObjectMissingError, match=r"nobody.*the last 900 bytes"):
            await reader.read_into(f"{server.url}/nobody", -900, target)


@pytest.mark.parametrize("fault", ["ignore_range", "status:code=416", "status:code=400", "status:code=501"])
async def test_end_is_read_from_servers_that_know_no_ends(server: FaultServer, fault: str) -> None:
    urls = [
        server.add(f"no-ends-{fault}-{k}", BODY, f"{fault}{',' if ':' in fault else ':'}range==-") for k in range(3)
    ]
    async with reader_with() as reader:
        for url in urls:
            target = memoryview(bytearray(1000))
            span = await reader.read_into(url, -1000, target)
            assert (span.start, span.stop, span.size) == (len(BODY) - 1000, len(BODY), len(BODY))
            assert target == BODY[-1000:]
    ends = [
        request
        for request in server.log
        if request.name.startswith(f"no-ends-{fault}") and "=-" in (request.range or "")
    ]
    assert {request.name for request in ends} == {f"no-ends-{fault}-0"}, "the others are not asked so"


async def test_end_of_an_object_behind_a_server_without_ranges_is_refused(server: FaultServer) -> None:
    url, short = server.add("never-ranges", BODY, "ignore_range"), server.add("short-never", SMALL, "ignore_range")
    target = memoryview(bytearray(1000))
    async with reader_with() as reader:
        with pytest.raises(BadResponseError, match="ignores byte ranges"):
            await reader.read_into(url, -1000, target)
    async with reader_with() as reader:
        span = await reader.read_into(short, -1000, target)
        assert (span.start, target) == (len(SMALL) - 1000, SMALL[-1000:])


LASTING = [
    ("slowdown", ThrottledError, 4, 503),
    ("s429", ThrottledError, 4, 429),
    ("s500", StorageError, 4, 500),
    ("s400", StorageError, 1, 400),
    ("s401", AccessDeniedError, 1, 401),
    ("s403", AccessDeniedError, 1, 403),
    ("s404", ObjectMissingError, 1, 404),
    ("reset_pre", StorageError, 4, None),
    ("close_pre", StorageError, 4, None),
    ("hang", ReadTimeoutError, 4, None),
    ("stall:at=0,s=3600", ReadTimeoutError, 4, None),
    ("close_body:at=0", ShortReadError, 4, None),
    ("short_chunked:at=0", ShortReadError, 4, None),
    ("wrong_range", BadResponseError, 2, None),
    ("wrong_range:mode=short", BadResponseError, 2, None),
    ("gzipped", BadResponseError, 2, None),
]


@pytest.mark.parametrize(("fault", "error", "attempts", "status"), LASTING, ids=[row[0] for row in LASTING])
async def test_lasting_fault_is_its_error(
    server: FaultServer, fault: str, error: type[StorageError], attempts: int, status: int | None
) -> None:
    name = f"lasting-{fault}"
    url = server.add(name, SMALL, fault)
    async with reader_with() as reader:
        with pytest.raises(error) as caught:
            await reader.read(url, 10, 500)
        assert (reader.meter.in_flight, reader.meter.errors) == (0, 1)
    assert type(caught.value) is error
    assert (caught.value.url, caught.value.start, caught.value.stop) == (url, 10, 500)
    assert (caught.value.attempts, caught.value.status) == (attempts, status)
    assert str(caught.value).count(url) == 1
    assert caught.value.__cause__ is not None
    assert len(server.requests_for(name)) == attempts
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_cut_body_is_continued_at_the_byte_reached(server: FaultServer) -> None:
    url = server.add("continued", BODY, "close_body:times=1,at=700_000", "close_body:times=1,at=10")
    async with reader_with() as reader:
        assert await reader.read(f"{url}?Signature=secret") == BODY
        assert reader.meter.bytes == len(BODY)
    assert {request.target for request in server.requests_for("continued")} == {"/continued?Signature=secret"}
    first, second, third = server.requests_for("continued")
    assert first.range is None
    assert second.range == f"bytes=700000-{len(BODY) - 1}"
    assert third.range == f"bytes=700010-{len(BODY) - 1}"
    assert second.headers["if-match"].startswith('"')


async def test_range_ends_with_the_object(server: FaultServer) -> None:
    url, empty = server.add("ends", SMALL), server.add("empty", b"")
    target = bytearray(b"." * 64)
    async with reader_with() as reader:
        span = await reader.read_into(url, len(SMALL) - 10, memoryview(target))
        assert (span.start, span.stop, span.size) == (len(SMALL) - 10, len(SMALL), len(SMALL))
        assert target == SMALL[-10:] + b"." * 54
        for start in (len(SMALL), len(SMALL) + 1000):
            span = await reader.read_into(url, start, memoryview(target))
            assert (span.start, span.stop, span.size) == (len(SMALL),) * 3
        assert await reader.read(url, len(SMALL) + 5, len(SMALL) + 9) == b""
        assert await reader.read(url, 5, 5) == b""
        assert await reader.read(url, start=len(SMALL) - 3) == SMALL[-3:]
        assert await reader.read(empty) == b""
        span = await reader.read_into(empty, 0, memoryview(target))
        assert (span.start, span.stop, span.size) == (0, 0, 0)


async def test_requests_at_once_are_bounded(server: FaultServer) -> None:
    urls = [server.add(f"bounded-{n}", SMALL, "hang") for n in range(3)]
    async with reader_with(concurrency=2, options=Fetch()) as reader:
        tasks = [asyncio.ensure_future(reader.read(url)) for url in urls]
        assert await asyncio.to_thread(server.wait_until_stalled)
        assert await asyncio.to_thread(server.wait_until_stalled)
        assert (reader.meter.in_flight, reader.meter.requests) == (2, 2)
        tasks[0].cancel()
        assert await asyncio.to_thread(server.wait_until_stalled)
        assert (reader.meter.in_flight, reader.meter.requests) == (2, 3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert reader.meter.in_flight == 0


class Longest(random.Random):
    def random(self) -> float:
        return 1.0


async def test_read_that_waits_for_its_next_attempt_holds_no_slot(server: FaultServer) -> None:
    failing, good = server.add("failing", SMALL, "slowdown"), server.add("good", SMALL)
    options = Fetch(backoff_s=30.0, backoff_cap_s=30.0)
    async with reader_with(concurrency=1, options=options, rng=Longest()) as reader:
        waiting = asyncio.ensure_future(reader.read(failing))
        await asyncio.sleep(0)
        assert await reader.read(good) == SMALL
        assert (reader.meter.requests, reader.meter.retries) == (2, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert reader.meter.in_flight == 0


async def test_failed_read_lets_go_of_its_target(server: FaultServer) -> None:
    url = server.add("lets-go", SMALL, "s500:times=1")
    target = bytearray(100)
    async with reader_with() as reader:
        view = memoryview(target)
        await reader.read_into(url, 0, view)
        view.release()
        target.append(0)  # BufferError while any view of it is alive


async def test_meter_counts_requests_bytes_and_time(server: FaultServer) -> None:
    url = server.add("metered", SMALL, "s500:times=1")
    meter, seconds = Meter(), itertools.count(0.0, 0.001)
    async with reader_with(meter=meter, clock=lambda: next(seconds)) as reader:
        await reader.read(url)
    assert (meter.requests, meter.retries, meter.errors, meter.bytes) == (2, 1, 0, len(SMALL))
    assert meter.waiting_s > 0


async def test_read_outside_a_loader_has_a_reader_of_its_own(server: FaultServer) -> None:
    assert await read(server.add("own", SMALL), 5, 10) == SMALL[5:10]


async def test_read_inside_a_loader_goes_through_the_loaders_reader() -> None:
    memory.put("memory://inside/a", SMALL)
    async with reader_with() as reader:
        token = running_reader.set(reader)
        assert await read("memory://inside/a") == SMALL
        running_reader.reset(token)
        assert reader.meter.requests == 1
    memory.remove("memory://inside/a")


async def test_file_that_is_not_there_is_named_with_the_part_that_is_missing(tmp_path: Path) -> None:
    async with reader_with() as reader:
        with pytest.raises(ObjectMissingError, match=r"has no file x\.tar"):
            await reader.read(str(tmp_path / "x.tar"))
        with pytest.raises(ObjectMissingError, match="has no folder not-mounted"):
            await reader.read(str(tmp_path / "not-mounted" / "deep" / "x.tar"))
        with pytest.raises(ObjectMissingError, match="folder, not a file"):
            await reader.read(str(tmp_path))


async def test_target_may_be_any_writable_buffer() -> None:
    memory.put("memory://target/a", SMALL)
    target = np.zeros(1000, np.float64)
    async with reader_with() as reader:
        span = await reader.read_into("memory://target/a", 3, memoryview(target))
    assert (span.start, span.stop) == (3, 8003)
    assert target.tobytes() == SMALL[3:8003]
    memory.remove("memory://target/a")


async def test_wrong_arguments_are_refused_before_any_request() -> None:
    with pytest.raises(OptionError, match="concurrency=0"):
        reader_with(concurrency=0)
    async with reader_with() as reader:
        for start, stop in ((-1, 5), (5, 4), (None, -1)):
            with pytest.raises(OptionError, match="no byte range"):
                await reader.read("memory://x", start, stop)
        with pytest.raises(OptionError, match="0 bytes"):
            await reader.read_into("memory://x", 0, memoryview(b""))
        with pytest.raises(OptionError, match="shell"):
            await reader.read("pipe:cat /etc/passwd")
        with pytest.raises(OptionError, match=r"'nowhere'.*known are s3"):
            await reader.read("nowhere://x/y")
        assert reader.meter.requests == 0
    with pytest.raises(LoaderClosedError):
        await reader.read("memory://x")


WHOLE = numbered(300_000)
OTHER = WHOLE[::-1]
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


@pytest.mark.parametrize(("before", "after", "error"), outcomes())
async def test_range_continues_with_the_same_version(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None
) -> None:
    whole = part(WHOLE, 0, len(WHOLE), *before)
    cut = Reply(whole[: len(whole) - HALF], "end")
    rest = part((WHOLE if error is None else OTHER)[HALF:], HALF, len(WHOLE), *after)
    async with serving(cut, rest) as server, Reader(QUICK, concurrency=2) as reader:
        if error is None:
            assert await reader.read(server.url, 0, len(WHOLE)) == WHOLE
            return
        with pytest.raises(error):
            await reader.read(server.url, 0, len(WHOLE))


@pytest.mark.parametrize("slips", [1, 2])
async def test_answer_without_a_version_is_asked_for_once_more(slips: int) -> None:
    whole, rest = part(WHOLE, 0, len(WHOLE), A), part(WHOLE[HALF:], HALF, len(WHOLE), A)
    page = part(WHOLE[HALF:], HALF, len(WHOLE))
    async with (
        serving(Reply(whole[: len(whole) - HALF], "end"), *[page] * slips, rest) as server,
        Reader(QUICK, concurrency=2) as reader,
    ):
        if slips == 1:
            assert await reader.read(server.url, 0, len(WHOLE)) == WHOLE
            return
        with pytest.raises(ObjectChangedError, match="now it has none"):
            await reader.read(server.url, 0, len(WHOLE))


@pytest.mark.parametrize(("before", "after", "error"), outcomes())
async def test_range_has_one_version(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None
) -> None:
    size = 80 * 512
    first = part(WHOLE[: 2 * size], 0, 3 * size, *before)
    last = part((WHOLE if error is None else OTHER)[2 * size : 3 * size], 2 * size, 3 * size, *after)
    short = Fetch(range_bytes=size, backoff_s=0.0, hedge_share=0, attempts=4)
    async with serving(first, last) as server, Reader(short, concurrency=1) as reader:
        if error is None:
            assert await reader.read(server.url, 0, 3 * size) == WHOLE[: 3 * size]
            return
        with pytest.raises((error, ExceptionGroup)) as raised:
            await reader.read(server.url, 0, 3 * size)
        assert isinstance(raised.value, error) or raised.group_contains(error)


@pytest.mark.parametrize(("before", "after", "error"), [one for one in outcomes() if one[0]])
async def test_next_read_of_an_object_is_of_the_version_that_the_first_was(
    before: Sequence[str], after: Sequence[str], error: type[StorageError] | None, tmp_path: Path
) -> None:
    """As formats read a table at the end, and then what it points to."""
    cached = Fetch(backoff_s=0.0, hedge_share=0, attempts=4, cache_dir=tmp_path)
    for options, storage in ((QUICK, None), (cached, None), (QUICK, OBSTORE)):
        answers = [part(WHOLE[:10], 0, 100, *before), part(WHOLE[10:20], 10, 100, *after)]
        async with serving(*answers) as server, Reader(options, concurrency=2, storage_options=storage) as reader:
            room = memoryview(bytearray(10))
            span = await reader.read_into(server.url, 0, room)
            if error is None:
                await reader.read_into(server.url, 10, room, etag=span.etag)
                assert bytes(room) == WHOLE[10:20]
            else:
                with pytest.raises(error):
                    await reader.read_into(server.url, 10, room, etag=span.etag)
            assert len(server.requests) >= 2


async def test_indexes_keep_no_version_that_is_made_of_a_date() -> None:
    assert lasting(ReportedVersion(modified="x").version) is None
    assert lasting(ReportedVersion(etag="x").version) == "x"
