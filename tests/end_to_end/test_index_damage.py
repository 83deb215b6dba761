"""Shards that contradict their index: the damaged sample is an error in its place."""

import asyncio
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders.loops import outcomes_of
from builders.tars import index_file, index_of_archive, number_of, numbered_samples, put_index, put_shards, tar

import headrace as hr
from headrace.fetch import Reader
from headrace.fetch.stores import memory
from headrace.formats.index.file import Entry, pack_directory
from headrace.testing import FaultServer

COUNTS = (7, 1, 12, 5)
TOTAL = sum(COUNTS)
ALL = list(range(TOTAL))
BAD = 10  # a sample of the third shard

Order = Callable[[hr.Stream], hr.Stream]
ORDERS: dict[str, Order] = {"in order": lambda data: data, "by number": lambda data: data.slice(0)}
ALL_ORDERS = {**ORDERS, "window": lambda data: data.shuffle("window"), "global": lambda data: data.shuffle("global")}
IN_ORDERS = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@pytest.fixture
def urls() -> list[str]:
    return put_shards(uuid.uuid4().hex, COUNTS)


def flip(urls: list[str], *numbers: int) -> None:
    """Change one bit of the last field of samples of the third shard."""
    archive = bytearray(asyncio.run(hr.read(urls[2])))
    for number in numbers:
        archive[archive.index(b"%06d.cls" % number) + 512] ^= 1
    memory.put(urls[2], bytes(archive))


def outcomes(data: Any, **options: Any) -> list[Any]:
    with hr.DataLoader(data, batch_size=None, **options) as loader:
        return outcomes_of(loader)


@pytest.mark.slow
@IN_ORDERS
@pytest.mark.parametrize("range_bytes", [512, 4096, 2**22])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_bit_is_an_error_in_the_place_of_its_sample(
    urls: list[str], order: Order, range_bytes: int, workers: int, warm_server: None
) -> None:
    index = put_index(urls)
    flip(urls, BAD)
    data = order(hr.stream(urls, index=index)).map(number_of)
    got = outcomes(data, fetch=hr.Fetch(range_bytes=range_bytes), num_workers=workers)
    error = got.pop(BAD)
    assert got == [n for n in ALL if n != BAD]
    assert isinstance(error, hr.errors.ChecksumError)
    assert (error.key, error.url) == (f"{BAD:06d}", urls[2])
    assert f"{BAD:06d}" in str(error) or f"key {BAD}" in "".join(error.__notes__)


@IN_ORDERS
def test_flipped_bit_is_unseen_without_checksums_or_in_an_unread_field(urls: list[str], order: Order) -> None:
    index, unchecked = put_index(urls), put_index(urls, crc=False)
    flip(urls, BAD)
    for chosen in (
        order(hr.stream(urls, index=index)).to_tuple("bin"),
        order(hr.stream(urls, index=index)).select("bin"),
    ):
        got = outcomes(chosen)
        assert len(got) == TOTAL
        assert not any(isinstance(one, Exception) for one in got)
    got = outcomes(order(hr.stream(urls, index=unchecked)))
    assert [sample["cls"] == str(n).encode() for n, sample in enumerate(got)] == [n != BAD for n in ALL]


def serve(server: FaultServer, *faults: str) -> tuple[str, str]:
    """A shard with these faults, and its index."""
    name = uuid.uuid4().hex
    url = server.add(f"{name}.tar", tar(numbered_samples(0, TOTAL)))
    index = put_index([url])
    server.add(f"{name}.tar", server.objects[f"{name}.tar"], *faults)
    server.log.clear()
    return url, index


@pytest.mark.slow
@IN_ORDERS
@pytest.mark.parametrize("cached", [False, True])
def test_wrong_bytes_are_requested_once_more(server: FaultServer, order: Order, cached: bool, tmp_path: Any) -> None:
    url, index = serve(server, "zeros:n=4000,first=1")
    data = order(hr.stream(url, index=index)).map(number_of)
    # the fault is that of each range's first request: ranges must not be joined to others the first time only
    fetch = hr.Fetch(cache_dir=tmp_path if cached else None, gap_bytes=0)
    assert outcomes(data, fetch=fetch) == ALL
    damaged = sum("zeros" in request.faults for request in server.log)
    assert damaged
    asked = [request.range for request in server.log]
    assert len(asked) <= 2 * len(set(asked))
    for _ in range(2 if cached else 0):
        assert outcomes(data, fetch=fetch) == ALL
        assert sum("zeros" in request.faults for request in server.log) == damaged


@IN_ORDERS
@pytest.mark.parametrize("crc", [False, True])
def test_a_shard_of_another_size_is_another_one(urls: list[str], order: Order, crc: bool) -> None:
    index = put_index(urls, crc=crc)
    memory.put(urls[2], asyncio.run(hr.read(urls[2])) + bytes(512))
    got = outcomes(order(hr.stream(urls, index=index)).map(number_of))
    errors = [one for one in got if isinstance(one, hr.errors.ObjectChangedError)]
    assert errors[0].url == urls[2]
    assert "indexed" in str(errors[0])
    assert (got[:8], got[-5:], len(got)) == (ALL[:8], ALL[20:], 13 + len(errors))


def etag_of(server: FaultServer, url: str) -> str:
    async def read() -> str:
        async with Reader(concurrency=1) as reader:
            return (await reader.read_into(url, 0, memoryview(bytearray(1)))).etag or ""

    return asyncio.run(read())


@pytest.mark.slow
@IN_ORDERS
def test_a_copy_with_another_version_is_fine_only_where_checksums_are_known(server: FaultServer, order: Order) -> None:
    url, _ = serve(server)
    etag = etag_of(server, url)
    assert etag
    for options in ({"crc": False, "etag": etag}, {"etag": '"older"'}):
        assert outcomes(order(hr.stream(url, index=put_index([url], **options))).map(number_of)) == ALL
    old = hr.stream(url, index=put_index([url], crc=False, etag='"older"'))
    assert isinstance(outcomes(order(old).map(number_of))[0], hr.errors.ObjectChangedError)


def with_late_block(server: FaultServer, fault: str) -> hr.Stream:
    """A stream whose index has a fault in the block of its shard."""
    url, _ = serve(server)
    index = index_of_archive(url, bytes(server.objects[url.rpartition("/")[2]]))
    block, other = index.pack(), bytes(4 * 2**20)
    first = Entry(name="memory://other/0.tar", samples=1, length=len(other), check=zlib.crc32(other))
    data = pack_directory([first, Entry.of(url, index, block)]) + other + block
    place = server.add(f"{uuid.uuid4().hex}.hri", data, f"{fault},range={len(data) - len(block)}-")
    return hr.stream(url, index=place)


async def got_by_number(data: Any) -> list[Any]:
    return await asyncio.gather(*(data.aget(n) for n in ALL), return_exceptions=True)


@pytest.mark.parametrize("checked", [True, False])
def test_an_index_that_headers_contradict_is_an_error(checked: bool) -> None:
    url = f"memory://{uuid.uuid4().hex}/a.tar"
    memory.put(url, archive := tar(numbered_samples(0, TOTAL)))
    index = index_of_archive(url, archive, crc=checked)
    exchanged = replace(index, rows=replace(index.rows, fields=index.rows.fields[::-1]))
    memory.put(url + ".hri", index_file([(url, exchanged)]))
    data = hr.stream(url, index=url + ".hri")
    by_number = asyncio.run(got_by_number(data))
    for got in (outcomes(data), outcomes(data.slice(0)), outcomes(data.shuffle("window")), by_number):
        assert [type(one) for one in got] == [hr.errors.ObjectChangedError] * TOTAL
        assert all("was indexed: in front of '0000" in str(one) and one.key is not None for one in got)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stall:s=60", "hang:s=60"])
@pytest.mark.parametrize("order", ALL_ORDERS.values(), ids=ALL_ORDERS)
def test_a_loader_can_be_closed_while_an_index_is_read(server: FaultServer, order: Order, fault: str) -> None:
    with hr.DataLoader(order(with_late_block(server, fault)), batch_size=4) as loader:
        batches = iter(loader)
        assert server.wait_until_stalled()
    with pytest.raises(hr.errors.LoaderClosedError):
        next(batches)
    assert server.wait_until_no_connection()


def test_a_call_that_waits_for_an_index_can_be_cancelled(server: FaultServer) -> None:
    data = with_late_block(server, "hang:s=60")

    async def main() -> None:
        tasks = [asyncio.create_task(data.aget(n)) for n in range(3)]
        assert await asyncio.to_thread(server.wait_until_stalled)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert server.wait_until_no_connection()


@pytest.mark.parametrize("order", ORDERS)
def test_an_index_block_that_fails_is_an_error_of_each_sample(server: FaultServer, order: str) -> None:
    errors = outcomes(ORDERS[order](with_late_block(server, "status:code=403")))
    assert [type(error) for error in errors] == [hr.errors.AccessDeniedError] * TOTAL
    for k, error in enumerate(errors):
        notes = [note for note in getattr(error, "__notes__", []) if "of the epoch" in note]
        assert len(notes) <= 1
        assert order == "in order" or f"sample {k} " in notes[0]
