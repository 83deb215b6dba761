"""Locations and costs of indexes, and errors of bad ones."""

from __future__ import annotations

import asyncio
import tracemalloc
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.loops import outcomes_of
from end_to_end.tars import index_of, index_of_archive, numbered_samples, put_shards, tar

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats.index.file import Entry, pack_directory
from headrace.testing import FaultServer

COUNTS = (7, 1, 12, 5)
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("index_files", COUNTS)


def put(data: bytes, name: str = "") -> str:
    url = f"memory://{uuid.uuid4().hex}/{name or 'index.hri'}"
    memory.put(url, data)
    return url


def serve(server: FaultServer, size: int = 700) -> list[str]:
    """Shards at a folder of their own, and their index in it."""
    folder, urls, first = uuid.uuid4().hex, [], 0
    for k, count in enumerate(COUNTS):
        urls.append(server.add(f"{folder}/{k}.tar", tar(numbered_samples(first, count, size))))
        first += count
    server.add(f"{folder}/all.hri", index_of(urls))
    server.log.clear()
    return urls


def index_beside(urls: list[str]) -> str:
    return urls[0].rpartition("/")[0] + "/all.hri"


def requests(server: FaultServer) -> list[str]:
    return [request.name.rpartition("/")[2] for request in server.log]


def test_one_request_opens_an_index_and_one_gets_a_sample(server: FaultServer) -> None:
    urls = serve(server)
    data = hr.stream(urls, index=index_beside(urls))
    assert requests(server) == []
    assert len(data) == TOTAL
    assert requests(server) == ["all.hri"]
    assert data[8]["cls"] == b"8"
    assert requests(server) == ["all.hri", "2.tar"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_global_shuffle_makes_one_request_a_sample(server: FaultServer, workers: int, warm_server: None) -> None:
    urls = serve(server, size=30_000)
    data = hr.stream(urls, index=index_beside(urls)).shuffle("global", seed=1).to_tuple("cls")
    with hr.DataLoader(data, batch_size=5, num_workers=workers) as loader:
        numbers = [int(n) for batch in loader for n in batch[0]]
        assert loader.stats().fetch.requests + loader.stats().fetch.coalesced == TOTAL
        assert loader.stats().fetch.bytes < 3 * TOTAL * 512
    assert sorted(numbers) == list(range(TOTAL))
    assert requests(server).count("all.hri") == 1


@pytest.mark.slow
@pytest.mark.parametrize("order", ["in order", "window", "global"])
def test_what_is_left_out_is_not_read(server: FaultServer, order: Any) -> None:
    urls = serve(server, size=30_000)
    data = hr.stream(urls, index=index_beside(urls))
    data = data if order == "in order" else data.shuffle(order)
    chosen = data.filter(lambda key: key.endswith("3"), field="__key__").select("cls")
    assert len(data) == TOTAL  # reads the index
    with hr.DataLoader(chosen, batch_size=None) as loader:
        assert sorted(int(sample["cls"]) for sample in loader) == [3, 13, 23]
        assert loader.stats().fetch.bytes == len("3") + len("13") + len("23")
    assert sorted(requests(server)) == ["0.tar", "2.tar", "3.tar", "all.hri"]


def test_samples_of_which_only_the_key_is_wanted_are_not_read(server: FaultServer) -> None:
    urls = serve(server)
    keys = [key for (key,) in hr.stream(urls, index=index_beside(urls)).to_tuple("__key__")]
    assert keys == [f"{n:06d}" for n in range(TOTAL)]
    assert requests(server) == ["all.hri"]


@pytest.mark.slow
def test_a_stream_of_a_hundred_thousand_shards_opens_by_one_request_in_little_memory(server: FaultServer) -> None:
    count = 100_000
    folder = f"{server.url}/many"
    shard = index_of_archive("", archive := tar(numbered_samples(0, 3)))
    block = shard.pack()
    pattern = [f"{folder}/train-{k:06d}.tar" for k in range(count)]
    entry = Entry.of("", shard, block)
    entries = [
        Entry(name=url, samples=3, size=entry.size, length=len(block), check=zlib.crc32(block)) for url in pattern
    ]
    server.add("many/all.hri", pack_directory(entries) + block * count)
    server.add("many/train-054321.tar", archive)
    del entries
    server.log.clear()
    tracemalloc.start()
    try:
        data = hr.stream(f"{folder}/train-{{000000..099999}}.tar", index=f"{folder}/all.hri")
        assert len(data) == 3 * count
        assert data[3 * 54321 + 1]["cls"] == b"1"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6
    names = requests(server)
    assert (names.count("all.hri"), names.count("train-054321.tar"), len(names)) in [(2, 1, 3), (3, 1, 4)]


def test_indexes_of_shards_in_another_order_are_an_error(urls: list[str]) -> None:
    indexes = [put(index_of([url])) for url in urls]
    assert list(hr.stream(urls, index=indexes)) == list(hr.stream(urls, index=None))
    with pytest.raises(hr.errors.FormatError, match=f"does not list {urls[0]}"):
        len(hr.stream(urls, index=indexes[::-1]))


def test_as_many_index_files_as_shards_are_needed(urls: list[str]) -> None:
    with pytest.raises(hr.OptionError, match="2 files for 4 shards"):
        len(hr.stream(urls, index=[put(index_of([url])) for url in urls[:2]]))


def test_an_index_lies_beside_each_shard(urls: list[str]) -> None:
    for url in urls:
        memory.put(f"{url}.hri", index_of([url]))
    data = hr.stream(urls, index="beside")
    assert len(data) == TOTAL
    assert list(data) == list(hr.stream(urls, index=None))
    assert data[-1]["cls"] == b"24"


def test_an_index_holds_for_shards_that_were_copied_with_it(server: FaultServer) -> None:
    urls = serve(server)
    copied = [server.add(f"elsewhere/v2/{url.partition('//')[2].partition('/')[2]}", b"") for url in urls]
    for url, copy in zip(urls, copied, strict=True):
        server.add(copy.removeprefix(f"{server.url}/"), asyncio.run(hr.read(url)))
    data = hr.stream([f"{url}?token=secret" for url in copied], index=index_beside(urls))
    assert [int(sample["cls"]) for sample in data] == list(range(TOTAL))
    assert data[20]["__url__"].startswith(copied[3])


def test_shards_may_come_in_another_order_than_in_the_index(urls: list[str]) -> None:
    index = put(index_of(urls))
    chosen = [urls[2], urls[0]]
    data = hr.stream(chosen, index=index)
    assert len(data) == 19
    assert list(data) == list(hr.stream(chosen, index=None))
    assert [data[0]["cls"], data[12]["cls"]] == [b"8", b"0"]


def broken(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def end_of_directory(index: bytes) -> int:
    return 24 + int.from_bytes(index[16:24], "little")


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda index: b"", "no headrace index file"),
    "another file": (lambda index: b"\x89PNG" + index, "no headrace index file"),
    "cut": (lambda index: index[:100], "damaged"),
    "of a newer version": (lambda index: index[:8] + b"\2" + index[9:], "version 2"),
    "with a flipped bit in its directory": (lambda index: broken(index, 50), "damaged"),
}


@pytest.mark.parametrize(("damage", "says"), BAD.values(), ids=BAD)
def test_a_bad_index_is_an_error_that_names_it(urls: list[str], damage: Callable[[bytes], bytes], says: str) -> None:
    index = put(damage(index_of(urls)))
    data = hr.stream(urls, index=index)
    for use in (len, list, lambda data: data[0], lambda data: list(data.shuffle("global"))):
        with pytest.raises(hr.errors.FormatError, match=says) as caught:
            use(data)
        assert index in str(caught.value)


@pytest.mark.parametrize("order", ["in order", "global"])
def test_a_bad_block_is_an_error_in_the_place_of_its_shard(urls: list[str], order: str) -> None:
    whole = index_of(urls)
    blocks = [index_of_archive(url, asyncio.run(hr.read(url))).pack() for url in urls]
    index = put(broken(whole, end_of_directory(whole) + len(blocks[0]) + len(blocks[1]) + 9))
    data = hr.stream(urls, index=index)
    assert len(data) == TOTAL
    with hr.DataLoader(data.slice(0) if order == "global" else data, batch_size=None) as loader:
        got = outcomes_of(loader)
    errors = [one for one in got if isinstance(one, hr.errors.FormatError)]
    assert "CRC-32" in str(errors[0])
    assert index in str(errors[0])
    assert sum("sample " in note for note in getattr(errors[0], "__notes__", [])) <= 1
    assert [int(sample["cls"]) for sample in got[-5:]] == list(range(20, 25))


def test_an_index_that_lacks_a_shard_says_which_and_what_to_do(urls: list[str]) -> None:
    index = put(index_of(urls[:2]))
    with pytest.raises(
        hr.errors.FormatError, match=r"does not list memory://index_files/2\.tar and 1 more shards: make"
    ):
        len(hr.stream(urls, index=index))


@pytest.mark.parametrize("where", ["one", "beside", "each"])
def test_an_index_that_is_missing_is_said_by_its_address(where: str) -> None:
    urls = put_shards("without_index", (2, 2))
    index: Any = {"one": "memory://without_index/a.hri", "beside": "beside"}.get(where)
    data = hr.stream(urls, index=index or ["memory://without_index/0.hri", "memory://without_index/1.hri"])
    for use in (len, list, lambda data: data[0], lambda data: asyncio.run(data.aget(0))):
        with pytest.raises(hr.errors.ObjectMissingError, match=r"memory://without_index/.*\.hri"):
            use(data)
    with hr.DataLoader(data, batch_size=2) as loader, pytest.raises(hr.errors.ObjectMissingError):
        next(iter(loader))


def test_shards_without_samples_or_bytes_are_no_error() -> None:
    archives = [tar([]), tar([("a", {"x": b""}), ("b", {"x": b"", "y": b""})]), tar([])]
    urls = [f"memory://nothing/{k}.tar" for k in range(3)]
    for url, archive in zip(urls, archives, strict=True):
        memory.put(url, archive)
    data = hr.stream(urls, index=put(index_of(urls)))
    assert len(data) == 2
    for chosen in (data, data.slice(0), data.shuffle("window"), data.shuffle("global")):
        assert sorted((sample["__key__"], len(sample)) for sample in chosen) == [("a", 3), ("b", 4)]
    with hr.DataLoader(data, batch_size=None) as loader:
        assert len(list(loader)) == 2
        assert loader.stats().fetch.requests == 0
    empty = hr.stream(urls[0], index=put(index_of(urls[:1])))
    assert (len(empty), list(empty), list(empty.shuffle("global")), list(empty.keys())) == (0, [], [], [])
    with pytest.raises(IndexError):
        empty[0]


def test_an_index_is_built_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    urls = put_shards("built", COUNTS)
    assert not hasattr(hr.stream(urls).source, "index")
    data = hr.stream(urls, index="build")
    assert len(data) == TOTAL
    assert data[20]["cls"] == b"20"
    memory.remove(urls[0])
    again = hr.stream(urls)
    assert len(again) == TOTAL
    assert again[20]["cls"] == b"20"
