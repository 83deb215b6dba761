"""Compressed shards: the same samples as those of plain ones, proved to the end."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import lzma
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
import zstandard
from end_to_end.tars import numbered_samples, same, tar

import headrace as hr
from headrace.fetch.reader import Reader
from headrace.fetch.stores import memory
from headrace.formats.index.shard import ShardIndex
from headrace.indexes.build_shard import build_shard

pytestmark = pytest.mark.usefixtures("warm_server")

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
}
SMALL = hr.FetchOptions(range_bytes=4096)


def put(data: bytes, ending: str) -> str:
    url = f"memory://{uuid.uuid4().hex}/0.{ending}"
    memory.put(url, data)
    return url


def batches(data: Any, **options: Any) -> list[Any]:
    """The batches, and last the error that ended them, if one did."""
    got: list[Any] = []
    with hr.DataLoader(data, **options) as loader:
        try:
            got.extend(loader)
        except hr.HeadraceError as error:
            got.append(error)
    return got


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("workers", [0, 2])
def test_compressed_shards_give_the_batches_of_plain_ones(ending: str, workers: int) -> None:
    whole = tar(numbered_samples(0, 90))
    half = len(whole) // 3
    frames = PACK[ending](whole[:half]) + PACK[ending](whole[half:])
    packed, plain = put(frames, f"tar.{ending}"), put(whole, "tar")
    options = {"batch_size": 16, "num_workers": workers, "fetch": SMALL}
    for shuffled in (False, True):
        streams = [
            hr.stream([url, url]).shuffle(seed=3) if shuffled else hr.stream([url, url]) for url in (packed, plain)
        ]
        left, right = (batches(stream.decode().select("bin", "cls").map(without_url), **options) for stream in streams)
        assert len(left) == 12
        assert same(left, right)


def without_url(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "__url__"}


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACK)
def test_a_truncated_shard_gives_what_is_whole_and_then_the_error(ending: str) -> None:
    bodies = [(f"{n:03d}", {"bin": bytes(((n * 7 + k) ** 3 >> 3) % 256 for k in range(3000))}) for n in range(40)]
    packed = PACK[ending](tar(bodies))
    url, after = put(packed[: len(packed) - 9], f"tar.{ending}"), put(tar(numbered_samples(100, 3)), "tar")
    got = batches(hr.stream([url, after]), batch_size=None, fetch=SMALL)
    assert isinstance(got[-1], hr.FormatError)
    assert "truncated" in str(got[-1]) or "end" in str(got[-1])
    assert got[-1].url == url
    keys = [sample["__key__"] for sample in got[:-1]]
    assert keys == [key for key, _ in bodies][: len(keys)]
    assert all(sample["bin"] == dict(bodies)[sample["__key__"]]["bin"] for sample in got[:-1])


@pytest.mark.parametrize("ending", PACK)
def test_zeros_that_follow_the_end_of_an_archive_are_no_bomb(ending: str) -> None:
    limits = hr.Limits(unpacked_free_bytes=4 * 2**20)
    url = put(PACK[ending](tar(numbered_samples(0, 3)) + bytes(40 * 2**20)), f"tar.{ending}")
    assert [sample["__key__"] for sample in hr.stream(url, limits=limits)] == ["000000", "000001", "000002"]
    assert len(asyncio.run(indexed(url, limits)).rows) == 3


@pytest.mark.parametrize("ending", ["bz2", "xz", "zst"])
def test_zeros_in_members_and_more_behind_zeros_are_a_bomb(ending: str) -> None:
    limits = hr.Limits(unpacked_free_bytes=2**20)
    zeros = bytes(40 * 2**20)
    for whole in (tar([("a", {"bin": zeros})]), tar([("a", {"bin": b"x"})]) + zeros + b"x" * 2**22):
        url = put(PACK[ending](whole), f"tar.{ending}")
        assert isinstance(batches(hr.stream(url, limits=limits), batch_size=None)[-1], hr.LimitError)
        with pytest.raises(hr.LimitError):
            asyncio.run(indexed(url, limits))


async def indexed(url: str, limits: hr.Limits) -> ShardIndex:
    async with Reader(hr.FetchOptions(), concurrency=1) as reader:
        return (await build_shard(reader, url, limits=limits))[0]


@pytest.mark.parametrize("ending", ["", *PACK])
def test_member_that_is_too_large_fails_by_its_own_limit_also_where_it_is_a_bomb(ending: str) -> None:
    limits = hr.Limits(unpacked_free_bytes=2**20, unpacked_ratio=10, member_bytes=2**20)
    whole = tar([("a", {"bin": b"x"}), ("b", {"bin": bytes(2**24)})])
    url = put(PACK[ending](whole) if ending else whole, f"tar.{ending}".rstrip("."))
    sample, error = batches(hr.stream(url, limits=limits), batch_size=None)
    assert sample["__key__"] == "a"
    told = r"^the size of the member 'b\.bin' is 16777216 bytes, over the limit of 1048576 "
    assert re.match(told, str(error))
    with pytest.raises(hr.LimitError, match=told):
        asyncio.run(indexed(url, limits))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2**20, 3 * 2**20, 2**24, "auto"])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("workers", [0, 2])
def test_any_memory_budget_is_enough(budget: Any, window: int | None, workers: int) -> None:
    shards = [[(f"{s}{n:03d}", {"bin": bytes(40_000 + n) + b"%d" % n}) for n in range(80)] for s in range(4)]
    urls = [put(gzip.compress(tar(samples), 1), "tar.gz") for samples in shards]
    data = hr.stream(urls).to_tuple("__key__", "bin")
    if window is not None:
        data = data.shuffle("window", window=window, seed=1)
    options = {"batch_size": 100, "collate_fn": list, "timeout": 20, "fetch": hr.FetchOptions(range_bytes=65536)}
    got = batches(data, memory_budget=budget, num_workers=workers, **options)
    keys = [key for batch in got for key, _ in batch]
    assert sorted(keys) == [key for samples in shards for key, _ in samples]
    assert (keys == sorted(keys)) == (window is None)


@pytest.mark.slow
def test_first_batches_that_are_larger_than_what_is_read_ahead_come() -> None:
    bodies = np.random.default_rng(0).integers(0, 16, (200, 120_000), np.uint8)
    urls = [put(gzip.compress(tar([(f"{n:03d}", {"bin": bodies[n].tobytes()}) for n in range(200)]), 1), "tar.gz")] * 5
    data = hr.stream(urls).to_tuple("bin")
    assert [len(batch) for batch in batches(data, batch_size=500, collate_fn=list, timeout=30)] == [500, 500]


@pytest.mark.parametrize("by_key", [False, True])
def test_a_replaced_shard_is_not_read_by_an_old_index(
    by_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = put(gzip.compress(tar(numbered_samples(0, 20))), "tar.gz")
    data = hr.stream(url, index="build")
    assert len(data) == 20
    memory.put(url, gzip.compress(tar(numbered_samples(0, 9))))
    data = data.filter(lambda key: key != "x", field="__key__") if by_key else data
    assert isinstance(batches(data, batch_size=8)[0], hr.ObjectChangedError)
