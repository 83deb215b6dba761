"""Locations, costs and wrong use of indexes, and errors of bad ones."""

import asyncio
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.loops import by_number, outcomes
from builders.numbers import Made, peak_of
from builders.tars import index_of, index_of_archive, number_of, numbered_samples, put_index, put_shards, tar

import headrace as hr
from headrace._util.context import running_reader
from headrace._util.sample_ranges import Rows
from headrace.cli import main as command
from headrace.fetch.stores import memory
from headrace.formats.index import Entry, ShardIndex, pack_directory
from headrace.formats.tar.scanner import TAR
from headrace.indexes.cache_path import cached
from headrace.testing import FaultServer

COUNTS = (7, 1, 12, 5)
TOTAL = sum(COUNTS)
USES: list[Callable[[Any], Any]] = [len, list, lambda data: data[0], lambda data: list(data.shuffle("global"))]


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("index_files", COUNTS)


def put_file(data: bytes) -> str:
    url = f"memory://{uuid.uuid4().hex}/index.hri"
    memory.put(url, data)
    return url


@pytest.fixture
def served(server: FaultServer) -> Callable[..., tuple[list[str], str]]:
    def serve(size: int = 700) -> tuple[list[str], str]:
        """The addresses of shards in a folder, and of their index in it."""
        folder, urls, first = uuid.uuid4().hex, [], 0
        for k, count in enumerate(COUNTS):
            urls.append(server.add(f"{folder}/{k}.tar", tar(numbered_samples(first, count, size))))
            first += count
        index = server.add(f"{folder}/all.hri", index_of(urls))
        server.log.clear()
        return urls, index

    return serve


def requests(server: FaultServer) -> list[str]:
    return [request.name.rpartition("/")[2] for request in server.log]


def test_one_request_opens_an_index_and_one_gets_a_sample(server: FaultServer, served: Any) -> None:
    urls, index = served()
    data = hr.stream(urls, index=index)
    assert requests(server) == []
    assert len(data) == TOTAL
    assert requests(server) == ["all.hri"]
    assert [key for (key,) in data.to_tuple("__key__")] == [f"{n:06d}" for n in range(TOTAL)]
    assert requests(server) == ["all.hri"]
    assert data[8]["cls"] == b"8"
    assert requests(server) == ["all.hri", "2.tar"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_global_shuffle_requests_each_sample(server: FaultServer, served: Any, workers: int, warm_server: None) -> None:
    urls, index = served(size=30_000)
    data = hr.stream(urls, index=index).shuffle("global", seed=1).to_tuple("cls")
    with hr.DataLoader(data, batch_size=5, num_workers=workers) as loader:
        numbers = [int(n) for batch in loader for n in batch[0]]
        assert loader.stats().fetch.requests + loader.stats().fetch.coalesced == TOTAL
        assert loader.stats().fetch.bytes < 3 * TOTAL * 512
    assert sorted(numbers) == list(range(TOTAL))
    assert requests(server).count("all.hri") == 1


@pytest.mark.slow
@pytest.mark.parametrize("order", ["in order", "window", "global"])
def test_samples_that_a_filter_of_keys_drops_are_not_read(server: FaultServer, served: Any, order: Any) -> None:
    urls, index = served(size=30_000)
    data = hr.stream(urls, index=index)
    data = data if order == "in order" else data.shuffle(order)
    chosen = data.filter(lambda key: key.endswith("3"), field="__key__").select("cls")
    assert len(data) == TOTAL  # reads the index
    with hr.DataLoader(chosen, batch_size=None) as loader:
        assert sorted(map(number_of, loader)) == [3, 13, 23]
        assert loader.stats().fetch.bytes == len("3") + len("13") + len("23")
        assert order == "global" or (loader.stats().fetch.shards_whole, loader.stats().fetch.shards_in_part) == (0, 3)
        assert order == "global" or "only where it was wanted" in loader.report()
    assert sorted(requests(server)) == ["0.tar", "2.tar", "3.tar", "all.hri"]


@pytest.mark.slow
def test_a_stream_of_a_hundred_thousand_shards_opens_by_one_request_in_little_memory(server: FaultServer) -> None:
    count, folder = 100_000, f"{server.url}/many"
    shard = index_of_archive("", archive := tar(numbered_samples(0, 3)))
    block = shard.pack()
    entry = {"samples": 3, "size": len(archive), "length": len(block), "check": zlib.crc32(block)}
    entries = [Entry(name=f"{folder}/train-{k:06d}.tar", **entry) for k in range(count)]  # type: ignore[arg-type]
    server.add("many/all.hri", pack_directory(entries) + block * count)
    server.add("many/train-054321.tar", archive)
    server.log.clear()

    def open_and_get() -> None:
        data = hr.stream(f"{folder}/train-{{000000..099999}}.tar", index=f"{folder}/all.hri")
        assert len(data) == 3 * count
        assert data[3 * 54321 + 1]["cls"] == b"1"

    assert peak_of(open_and_get) < 100e6
    names = requests(server)
    assert names.count("train-054321.tar") == 1
    assert names.count("all.hri") == len(names) - 1 in (2, 3)


def test_each_shard_may_have_an_index_file_in_the_order_of_shards(urls: list[str]) -> None:
    for url in urls:
        memory.put(f"{url}.hri", index_of([url]))
    indexes = [f"{url}.hri" for url in urls]
    for data in (hr.stream(urls, index=indexes), hr.stream(urls, index="beside")):
        assert len(data) == TOTAL
        assert list(data) == list(hr.stream(urls, index=None))
        assert data[-1]["cls"] == b"24"
    with pytest.raises(hr.errors.FormatError, match=f"does not list {urls[0]}"):
        len(hr.stream(urls, index=indexes[::-1]))
    with pytest.raises(hr.OptionError, match="2 files for 4 shards"):
        len(hr.stream(urls, index=indexes[:2]))


def test_an_index_holds_for_shards_that_were_copied_with_it(server: FaultServer, served: Any) -> None:
    urls, index = served()
    copied = [
        server.add(f"elsewhere/v2/{url.partition('//')[2].partition('/')[2]}", asyncio.run(hr.read(url)))
        for url in urls
    ]
    data = hr.stream([f"{url}?token=secret" for url in copied], index=index)
    assert list(map(number_of, data)) == list(range(TOTAL))
    assert data[20]["__url__"].startswith(copied[3])


def test_an_index_may_have_more_shards_in_another_order_but_not_fewer(urls: list[str]) -> None:
    chosen = [urls[2], urls[0]]
    data = hr.stream(chosen, index=put_file(index_of(urls)))
    assert len(data) == 19
    assert list(data) == list(hr.stream(chosen, index=None))
    assert [data[0]["cls"], data[12]["cls"]] == [b"8", b"0"]
    with pytest.raises(
        hr.errors.FormatError, match=r"does not list memory://index_files/2\.tar and 1 more shards: make"
    ):
        len(hr.stream(urls, index=put_file(index_of(urls[:2]))))


def broken(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda index: b"", "no headrace index file"),
    "another file": (lambda index: b"\x89PNG" + index, "no headrace index file"),
    "cut": (lambda index: index[:100], "damaged"),
    "of a newer version": (lambda index: index[:8] + b"\2" + index[9:], "version 2"),
    "with a flipped bit in its directory": (lambda index: broken(index, 50), "damaged"),
}


@pytest.mark.parametrize(("damage", "match"), BAD.values(), ids=BAD)
def test_a_bad_index_is_an_error_that_names_it(urls: list[str], damage: Callable[[bytes], bytes], match: str) -> None:
    index = put_file(damage(index_of(urls)))
    for use in USES:
        with pytest.raises(hr.errors.FormatError, match=match) as caught:
            use(hr.stream(urls, index=index))
        assert index in str(caught.value)


@pytest.mark.parametrize("order", ["in order", "global"])
def test_a_bad_block_is_an_error_in_the_place_of_its_shard(urls: list[str], order: str) -> None:
    whole = index_of(urls)
    blocks = [index_of_archive(url, asyncio.run(hr.read(url))).pack() for url in urls]
    index = put_file(broken(whole, len(whole) - len(blocks[3]) - len(blocks[2]) + 9))
    data = hr.stream(urls, index=index)
    assert len(data) == TOTAL
    got = outcomes(by_number(data) if order == "global" else data, batch_size=None)
    errors = [one for one in got if isinstance(one, hr.errors.FormatError)]
    assert "CRC-32" in str(errors[0])
    assert index in str(errors[0])
    assert sum("sample " in note for note in getattr(errors[0], "__notes__", [])) <= 1
    assert list(map(number_of, got[-5:])) == list(range(20, 25))


@pytest.mark.parametrize(
    "index", ["memory://no_index/a.hri", "beside", [f"memory://no_index/{k}.hri" for k in range(2)]]
)
def test_an_index_that_is_missing_is_named_by_its_address(index: Any) -> None:
    data = hr.stream(put_shards("no_index", (2, 2)), index=index)
    for use in (*USES, lambda data: asyncio.run(data.aget(0))):
        with pytest.raises(hr.errors.ObjectMissingError, match=r"memory://no_index/.*\.hri"):
            use(data)
    with hr.DataLoader(data, batch_size=2) as loader, pytest.raises(hr.errors.ObjectMissingError):
        next(iter(loader))


def test_shards_without_samples_or_bytes_are_no_error() -> None:
    archives = [tar([]), tar([("a", {"x": b""}), ("b", {"x": b"", "y": b""})]), tar([])]
    urls = [f"memory://nothing/{k}.tar" for k in range(3)]
    for url, archive in zip(urls, archives, strict=True):
        memory.put(url, archive)
    data = hr.stream(urls, index=put_index(urls))
    assert len(data) == 2
    for chosen in (data, by_number(data), data.shuffle("window"), data.shuffle("global")):
        assert sorted((sample["__key__"], len(sample)) for sample in chosen) == [("a", 3), ("b", 4)]
    with hr.DataLoader(data, batch_size=None) as loader:
        assert len(list(loader)) == 2
        assert loader.stats().fetch.requests == 0
    empty = hr.stream(urls[0], index=put_index(urls[:1]))
    assert (len(empty), list(empty), list(empty.shuffle("global")), list(empty.keys())) == (0, [], [], [])
    with pytest.raises(IndexError):
        empty[0]


def test_an_index_is_built_where_it_is_asked_for_and_refused_once_the_shard_is_another() -> None:
    urls = put_shards("built", COUNTS)
    assert not hasattr(hr.stream(urls).source, "index")
    data = hr.stream(urls, index="build")
    assert len(data) == TOTAL
    assert data[20]["cls"] == b"20"
    memory.put(urls[0], tar(numbered_samples(0, 9)))
    for read in (lambda: data[0], lambda: list(hr.stream(urls))):
        with pytest.raises(hr.errors.ObjectChangedError, match=r"make a new index .*index=None"):
            read()
    memory.remove(urls[0])
    again = hr.stream(urls)
    assert len(again) == TOTAL
    assert again[20]["cls"] == b"20"


NO_NUMBERS = r"\.sample\(\): .* must be whole numbers in one dimension"
REFUSED: list[tuple[Callable[[hr.Stream], Any], str]] = [
    *(
        (lambda data, numbers=numbers: list(data.sample(numbers)), NO_NUMBERS)
        for numbers in (np.arange(10) % 7 == 6, torch.arange(10) > 3, [0.5, 1.9], [[1, 2], [3, 4]])
    ),
    (lambda data: data.sample(iter([3, 4])), "a sampler, or a list"),
    (lambda data: data.shuffle("window", window=2).slice(0, 3), "windows"),
    *((lambda _, index=index: hr.stream("memory://x/0.tar", index=index), "index=") for index in ("", [], 5, True)),
]


@pytest.mark.parametrize(("use", "match"), REFUSED)
def test_wrong_use_is_refused(urls: list[str], use: Callable[[hr.Stream], Any], match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        use(hr.stream(urls, index=put_file(index_of(urls))))


def test_command_keeps_shards_and_indexes_of_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard, good, bad, output = (tmp_path / name for name in ("x.tar", "good", "bad", "index.hri"))
    shard.write_bytes(whole := tar(numbered_samples(0, 3)))
    assert command(["index", str(shard), "--output", str(shard)]) == 1
    assert "x.tar is a shard by its name" in capsys.readouterr().err
    assert shard.read_bytes() == whole
    good.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    bad.write_bytes(b"no shard")
    assert command(["index", str(good), str(bad), "--format", "jsonl", "--output", str(output), "--quiet"]) == 1
    assert command(["index", str(good), "--format", "tar", "--output", str(output), "--quiet"]) == 1
    assert "1 of 1 shards failed" in capsys.readouterr().err


def test_an_index_that_could_not_be_opened_is_not_made() -> None:
    keys = np.array([b"k%d" % n for n in range(20_000)] + [b"k" * 3901])
    count = len(keys)
    offsets, sizes = 1024 * np.arange(count) + 512, np.ones(count, np.int64)
    many = Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offsets, sizes, ("a",))
    with pytest.raises(hr.errors.LimitError, match="keys of up to 3901 bytes"):
        ShardIndex(many, None, 2**30, None).pack()


def test_a_cache_without_permission_has_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    assert cached(["memory://x/0.tar"], None, TAR) is None


@pytest.mark.parametrize(("way", "match"), [("auto", "has no length"), ("build", "must be a JSON object")])
def test_each_format_has_an_index_of_its_own(way: str, match: str) -> None:
    url = "memory://formats/rows"
    memory.put(url, tar([("0", {"n": b'1}\n{"a": 7}\n{"b": 8'}), ("1", {"n": b"2"})]))
    assert command(["index", url, "--format", "tar", "--quiet"]) == 0
    assert len(hr.stream(url, format="tar", index="auto")) == 2
    with pytest.raises((TypeError, hr.errors.FormatError), match=match):
        len(hr.stream(url, format="jsonl", index=way))
    assert len(hr.stream(url, format="tar", index=way)) == 2


def test_a_stream_asked_inside_another_loader_reads_from_its_own_store() -> None:
    urls = put_shards("inner", [4])
    inner = hr.stream(urls, index=put_index(urls), storage_options={"endpoint": "http://inner"})

    async def get(key: int) -> int:
        running = running_reader.get()
        sample = await inner.aget(key)
        assert running_reader.get() is running
        return number_of(sample)

    with hr.DataLoader(Made(get, 4), batch_size=4) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        assert loader.stats().fetch.requests == 0, "they were made by a reader with the inner stream's options"


def test_a_call_goes_on_when_another_that_opened_the_index_is_cancelled() -> None:
    urls = put_shards("cancelled", [6])
    index = put_index(urls)

    async def ask(turns: int) -> None:
        data = hr.stream(urls, index=index)
        first = asyncio.create_task(data.aget(0))
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert (await data.aget(1))["cls"] == b"1"
        await asyncio.gather(first, return_exceptions=True)

    for turns in range(40):  # wherever the first one is then
        asyncio.run(ask(turns))
