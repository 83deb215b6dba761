"""Shards that contradict their index: the damaged sample is an error in its place."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders.loops import outcomes_of
from end_to_end.tars import index_file, index_of_archive, numbered_samples, put_index, put_shards, tar

import headrace as hr
from headrace.fetch import Reader
from headrace.fetch.stores import memory
from headrace.formats.index.file import Entry, pack_directory
from headrace.formats.index.shard import ShardIndex
from headrace.testing import FaultServer

COUNTS = (7, 1, 12, 5)
TOTAL = sum(COUNTS)
BAD = 10  # a sample of the third shard


@pytest.fixture
def urls() -> list[str]:
    return put_shards(uuid.uuid4().hex, COUNTS)


def flipped(archive: bytes, number: int = BAD) -> bytes:
    """The archive with one bit of a sample's last field changed."""
    at = archive.index(b"%06d.cls" % number) + 512
    return archive[:at] + bytes([archive[at] ^ 1]) + archive[at + 1 :]


def outcomes(data: Any, **options: Any) -> list[Any]:
    with hr.DataLoader(data, **{"batch_size": None, **options}) as loader:
        return outcomes_of(loader)


def number(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


ORDERS: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "in order": lambda data: data,
    "by number": lambda data: data.slice(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("range_bytes", [512, 4096, 2**22])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_bit_is_an_error_in_the_place_of_its_sample(
    urls: list[str], order: Callable[[hr.Stream], hr.Stream], range_bytes: int, workers: int, warm_server: None
) -> None:
    index = put_index(urls)
    memory.put(urls[2], flipped(asyncio.run(hr.read(urls[2]))))
    data = order(hr.stream(urls, index=index)).map(number)
    got = outcomes(data, fetch=hr.FetchOptions(range_bytes=range_bytes), num_workers=workers)
    error = got.pop(BAD)
    assert got == [n for n in range(TOTAL) if n != BAD]
    assert isinstance(error, hr.errors.ChecksumError)
    assert (error.key, error.url) == (f"{BAD:06d}", urls[2])
    assert f"{BAD:06d}" in str(error) or f"key {BAD}" in "".join(error.__notes__)


def test_flipped_samples_are_left_out_where_errors_are_skipped(urls: list[str]) -> None:
    index = put_index(urls)
    memory.put(urls[2], flipped(flipped(asyncio.run(hr.read(urls[2]))), BAD + 1))
    for order in (*ORDERS.values(), lambda data: data.shuffle("window", window=3, seed=1)):
        data = order(hr.stream(urls, index=index)).map(number)
        with hr.DataLoader(data, batch_size=4, on_error="skip", collate_fn=list) as loader:
            assert sorted(n for batch in loader for n in batch) == [n for n in range(TOTAL) if n not in (10, 11)]
            assert loader.stats().skipped == 2


def test_a_flipped_bit_of_a_field_that_is_not_wanted_is_no_error(urls: list[str]) -> None:
    index = put_index(urls)
    memory.put(urls[2], flipped(asyncio.run(hr.read(urls[2]))))
    for order in ORDERS.values():
        assert len(outcomes(order(hr.stream(urls, index=index)).to_tuple("bin"))) == TOTAL
        assert not any(
            isinstance(got, Exception) for got in outcomes(order(hr.stream(urls, index=index)).select("bin"))
        )


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_flipped_bit_is_not_seen_without_checksums(urls: list[str], order: Callable[[hr.Stream], hr.Stream]) -> None:
    index = put_index(urls, crc=False)
    memory.put(urls[2], flipped(asyncio.run(hr.read(urls[2]))))
    got = outcomes(order(hr.stream(urls, index=index)))
    assert [sample["cls"] == str(n).encode() for n, sample in enumerate(got)] == [n != BAD for n in range(TOTAL)]


def serve(server: FaultServer, *faults: str) -> tuple[str, str]:
    """A shard with these faults, and its index; what was asked for that is forgotten."""
    name = uuid.uuid4().hex
    url = server.add(f"{name}.tar", tar(numbered_samples(0, TOTAL)))
    index = put_index([url])
    server.add(f"{name}.tar", server.objects[f"{name}.tar"], *faults)
    server.log.clear()
    return url, index


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("cached", [False, True])
def test_bytes_that_were_wrong_once_are_asked_for_once_more(
    server: FaultServer, order: Callable[[hr.Stream], hr.Stream], cached: bool, tmp_path: Any
) -> None:
    url, index = serve(server, "zeros:n=4000,first=1")
    data = order(hr.stream(url, index=index)).map(number)
    # the fault is that of each range's first request: ranges must not be joined to others the first time only
    fetch = hr.FetchOptions(cache_dir=tmp_path if cached else None, gap_bytes=0)
    expected = list(range(TOTAL))
    with hr.DataLoader(data, batch_size=None, fetch=fetch) as loader:
        assert list(loader) == expected
        damaged = sum("zeros" in request.faults for request in server.log)
        assert damaged
        asked = [request.range for request in server.log]
        assert len(asked) <= 2 * len(set(asked))
    if cached:
        assert outcomes(data, fetch=fetch) == expected
        assert outcomes(data, fetch=fetch) == expected
        assert sum("zeros" in request.faults for request in server.log) == damaged


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("crc", [False, True])
def test_a_shard_of_another_size_is_another_one(
    urls: list[str], order: Callable[[hr.Stream], hr.Stream], crc: bool
) -> None:
    index = put_index(urls, crc=crc)
    memory.put(urls[2], asyncio.run(hr.read(urls[2])) + bytes(512))
    got = outcomes(order(hr.stream(urls, index=index)).map(number))
    errors = [one for one in got if isinstance(one, hr.errors.ObjectChangedError)]
    assert errors
    assert errors[0].url == urls[2]
    assert "indexed" in str(errors[0])
    assert got[:8] == list(range(8))
    assert got[-5:] == list(range(20, 25))
    assert len(got) == 13 + len(errors)


def etag_of(server: FaultServer, url: str) -> str:
    async def read() -> str:
        async with Reader(concurrency=1) as reader:
            return (await reader.read_into(url, 0, memoryview(bytearray(1)))).etag or ""

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_copy_with_another_version_is_fine_only_where_checksums_are_known(
    server: FaultServer, order: Callable[[hr.Stream], hr.Stream]
) -> None:
    url, _ = serve(server)
    etag = etag_of(server, url)
    assert etag
    same, old = put_index([url], crc=False, etag=etag), put_index([url], crc=False, etag='"older"')
    checked = put_index([url], crc=True, etag='"older"')
    assert outcomes(order(hr.stream(url, index=same)).map(number)) == list(range(TOTAL))
    assert outcomes(order(hr.stream(url, index=checked)).map(number)) == list(range(TOTAL))
    assert isinstance(outcomes(order(hr.stream(url, index=old)).map(number))[0], hr.errors.ObjectChangedError)


def test_parts_of_two_versions_are_not_taken_for_one_shard(server: FaultServer) -> None:
    url, _ = serve(server, "etag")  # another one with each answer
    data = hr.stream(url, index=put_index([url], crc=False)).map(number)
    got = outcomes(data, fetch=hr.FetchOptions(range_bytes=4096))
    assert isinstance(got[-1], hr.errors.ObjectChangedError)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_shard_that_is_missing_is_an_error_in_its_place(
    urls: list[str], order: Callable[[hr.Stream], hr.Stream]
) -> None:
    index = put_index(urls)
    memory.remove(urls[1])
    got = outcomes(order(hr.stream(urls, index=index)).map(number))
    assert isinstance(got.pop(7), hr.errors.ObjectMissingError)
    assert got == [n for n in range(TOTAL) if n != 7]


def serve_index_with_a_late_block(server: FaultServer, fault: str) -> hr.Stream:
    url, _ = serve(server)
    index = index_of_archive(url, bytes(server.objects[url.rpartition("/")[2]]))
    block, other = index.pack(), bytes(4 * 2**20)
    entries = [
        Entry(name="memory://other/0.tar", samples=1, length=len(other), check=zlib.crc32(other)),
        Entry.of(url, index, block),
    ]
    data = pack_directory(entries) + other + block
    place = server.add(f"{uuid.uuid4().hex}.hri", data, f"{fault},range={len(data) - len(block)}-")
    return hr.stream(url, index=place)


def exchange_fields(index: ShardIndex) -> ShardIndex:
    return replace(index, rows=replace(index.rows, fields=index.rows.fields[::-1]))


async def got_by_number(data: Any) -> list[Any]:
    return await asyncio.gather(*(data.aget(n) for n in range(TOTAL)), return_exceptions=True)


@pytest.mark.parametrize("checked", [True, False])
def test_an_index_that_headers_contradict_is_an_error(checked: bool) -> None:
    url = f"memory://{uuid.uuid4().hex}/a.tar"
    memory.put(url, tar(numbered_samples(0, TOTAL)))
    index = exchange_fields(index_of_archive(url, asyncio.run(hr.read(url))))
    place = url + ".hri"
    memory.put(place, index_file([(url, index if checked else replace(index, crc=None))]))
    data = hr.stream(url, index=place)
    by_number = asyncio.run(got_by_number(data))
    for got in (outcomes(data), outcomes(data.slice(0)), outcomes(data.shuffle("window")), by_number):
        wrong = [one for one in got if isinstance(one, hr.errors.ObjectChangedError)]
        assert len(got) == TOTAL
        assert len(wrong) == TOTAL
        assert all("was indexed: in front of '0000" in str(one) and one.key is not None for one in wrong)


ALL_ORDERS = {**ORDERS, "window": lambda data: data.shuffle("window"), "global": lambda data: data.shuffle("global")}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stall:s=60", "hang:s=60"])
@pytest.mark.parametrize("order", ALL_ORDERS.values(), ids=ALL_ORDERS)
def test_a_loader_can_be_closed_while_an_index_is_read(
    server: FaultServer, order: Callable[[hr.Stream], hr.Stream], fault: str
) -> None:
    data = order(serve_index_with_a_late_block(server, fault))
    with hr.DataLoader(data, batch_size=4) as loader:
        batches = iter(loader)
        assert server.wait_until_stalled()
    with pytest.raises(hr.errors.LoaderClosedError):
        next(batches)
    assert server.wait_until_no_connection()


def test_who_waits_for_an_index_can_be_cancelled(server: FaultServer) -> None:
    data = serve_index_with_a_late_block(server, "hang:s=60")

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


@pytest.mark.parametrize("order", ["by number", "in order"])
def test_an_index_block_that_fails_says_so_to_each_sample_once(server: FaultServer, order: str) -> None:
    data = ORDERS[order](serve_index_with_a_late_block(server, "status:code=403"))
    errors = outcomes(data)
    assert len(errors) == TOTAL  # each in its own place
    for k, error in enumerate(errors):
        assert isinstance(error, hr.errors.AccessDeniedError)
        notes = [note for note in getattr(error, "__notes__", []) if "of the epoch" in note]
        assert len(notes) <= 1
        assert order == "in order" or f"sample {k} " in notes[0]
