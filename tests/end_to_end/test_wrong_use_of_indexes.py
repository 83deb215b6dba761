"""Wrong use of indexes is refused with a remedy."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.numbers import Made
from end_to_end.tars import numbered_samples, put_index, put_shards, tar

import headrace as hr
from headrace._util.context import running_reader
from headrace._util.sample_ranges import Rows
from headrace.cli import main as command
from headrace.fetch.stores import memory
from headrace.formats.index.shard import ShardIndex
from headrace.formats.tar.format import TAR
from headrace.indexes.cache_path import cache_path, cached


@pytest.fixture(scope="module")
def data() -> hr.Stream:
    urls = put_shards("wrong-use", [6, 4])
    return hr.stream(urls, index=put_index(urls))


NO_NUMBERS = {
    "mask": np.arange(10) % 7 == 6,
    "tensor": torch.arange(10) > 3,
    "fractions": [0.5, 1.9],
    "table": [[1, 2], [3, 4]],
}


@pytest.mark.parametrize("numbers", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_list_of_numbers_gives_no_samples(data: hr.Stream, numbers: Any) -> None:
    with pytest.raises(hr.OptionError, match=r"\.sample\(\): whole numbers of samples are needed, not an array of"):
        list(data.sample(numbers))


def test_an_iterator_that_is_used_up_after_one_epoch_is_no_sampler(data: hr.Stream) -> None:
    with pytest.raises(hr.OptionError, match="a sampler, or a list"):
        data.sample(iter([3, 4]))


def test_numbers_and_windows_do_not_go_together(data: hr.Stream) -> None:
    with pytest.raises(hr.OptionError, match="windows"):
        data.shuffle("window", window=2).slice(0, 3)


@pytest.mark.parametrize("index", ["", [], 5, True])
def test_an_index_that_is_none_is_told_by_its_own_name(index: Any) -> None:
    with pytest.raises(hr.OptionError, match="index="):
        hr.stream("memory://x/0.tar", index=index)


def test_the_command_never_writes_over_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tmp_path / "x.tar"
    shard.write_bytes(whole := tar(numbered_samples(0, 3)))
    assert command(["index", str(shard), "--output", str(shard)]) == 1
    assert "x.tar is a shard by its name" in capsys.readouterr().err
    assert shard.read_bytes() == whole


def test_an_index_that_could_not_be_opened_is_not_made() -> None:
    keys = np.array([b"k%d" % n for n in range(20_000)] + [b"k" * 3901])
    count = len(keys)
    offsets, sizes = 1024 * np.arange(count) + 512, np.ones(count, np.int64)
    many = Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offsets, sizes, ("a",))
    with pytest.raises(hr.errors.LimitError, match="keys of up to 3901 bytes"):
        ShardIndex(many, None, 2**30, None).pack()


def test_a_cache_that_may_not_be_looked_into_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    assert cached(["memory://x/0.tar"], None, TAR) is None


def test_each_store_has_an_index_of_its_own() -> None:
    places = [
        cache_path(["s3://b/0.tar"], options) for options in (None, {"endpoint": "http://a"}, {"endpoint": "http://b"})
    ]
    assert len(set(places)) == 3
    assert cache_path(["s3://b/0.tar"], {"secret_access_key": "x"}) == places[0]


@pytest.mark.parametrize(("way", "says"), [("auto", "has no length"), ("build", "must be a JSON object")])
def test_each_format_has_an_index_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, says: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = "memory://formats/rows"
    memory.put(url, tar([("0", {"n": b'1}\n{"a": 7}\n{"b": 8'}), ("1", {"n": b"2"})]))
    assert command(["index", url, "--format", "tar", "--quiet"]) == 0
    assert len(hr.stream(url, format="tar", index="auto")) == 2
    with pytest.raises((TypeError, hr.errors.FormatError), match=says):
        len(hr.stream(url, format="jsonl", index=way))
    assert len(hr.stream(url, format="tar", index=way)) == 2


def test_what_was_indexed_as_of_one_format_is_not_gone_on_with_as_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, output = tmp_path / "good", tmp_path / "bad", tmp_path / "index.hri"
    good.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    bad.write_bytes(b"no shard")
    assert command(["index", str(good), str(bad), "--format", "jsonl", "--output", str(output), "--quiet"]) == 1
    assert command(["index", str(good), "--format", "tar", "--output", str(output), "--quiet"]) == 1
    assert "1 of 1 shards failed" in capsys.readouterr().err


def test_a_shard_that_was_rewritten_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (url,) = put_shards("rewritten", [5])
    data = hr.stream(url, index="build")
    assert len(data) == 5
    memory.put(url, tar(numbered_samples(0, 9)))
    for read in (lambda: data[0], lambda: list(hr.stream(url))):
        with pytest.raises(hr.errors.ObjectChangedError, match=r"make a new index .*index=None"):
            read()


def test_a_stream_asked_inside_another_loader_reads_from_its_own_store() -> None:
    urls = put_shards("inner", [4])
    inner = hr.stream(urls, index=put_index(urls), storage_options={"endpoint": "http://inner"})

    async def get(key: int) -> int:
        running = running_reader.get()
        sample = await inner.aget(key)
        assert running_reader.get() is running
        return int(sample["cls"])

    with hr.DataLoader(Made(get, 4), batch_size=4) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        assert loader.stats().fetch.requests == 0, "they were made by a reader with the inner stream's options"


def test_who_asks_while_another_one_is_cancelled_is_not() -> None:
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


def test_pax_archives_are_read_like_a_stream_and_counted_as_whole() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for n in range(300):
            member = tarfile.TarInfo(f"{n:03d}.bin")
            member.size, member.mtime = 700, 1.5  # needs an extended header
            archive.addfile(member, io.BytesIO(bytes([n % 251]) * 700))
    url = "memory://pax/0.tar"
    memory.put(url, out.getvalue())
    with hr.DataLoader(hr.stream(url, index=put_index([url])), batch_size=None) as loader:
        assert [sample["bin"][0] for sample in loader] == [n % 251 for n in range(300)]
        fetch = loader.stats().fetch
    assert (fetch.shards_whole, fetch.shards_in_part) == (1, 0)
    assert fetch.requests <= 3  # the index, and the shard


def test_shards_of_which_little_is_wanted_are_counted_as_such() -> None:
    (url,) = put_shards("in-part", [40], size=40_000)
    data = hr.stream(url, index=put_index([url])).filter(lambda key: key.endswith("7"), field="__key__")
    with hr.DataLoader(data, batch_size=None) as loader:
        assert [sample["__key__"] for sample in loader] == [f"{n:06d}" for n in (7, 17, 27, 37)]
        assert (loader.stats().fetch.shards_whole, loader.stats().fetch.shards_in_part) == (0, 1)
        assert "only where it was wanted" in loader.report()
