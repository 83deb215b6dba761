"""Indexes of shards on servers: place and checksum of each member."""

import asyncio
import bz2
import gzip
import io
import itertools
import lzma
import random
import tarfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import lz4.frame
import numpy as np
import pytest
import zstandard
from builders.seekable import in_frames
from builders.tars import numbered_samples, tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moto_s3 import client_of
from network.bodies import OBSTORE_KEEPS

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, ObjectChangedError, OptionError, StorageError
from headrace.fetch import Reader
from headrace.fetch.stores import memory
from headrace.fetch.stores.writing import write_object
from headrace.formats.index import Directory, ShardIndex, check_block, read_directory
from headrace.indexes.building import BuildProgress, build_file, build_index, build_shard
from headrace.indexes.cache_path import beside, cache_path
from headrace.options import Fetch
from headrace.testing import FaultServer

CREDENTIALS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


@pytest.fixture(autouse=True)
def _cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LARGE = tar(numbered_samples(0, 120, 86_000))  # 10 MB: several pieces, and members that cross two of them
MEDIUM = tar(numbered_samples(0, 60, 40_000))
SMALL = tar(numbered_samples(0, 400, 1_600))


def by_tarfile(data: bytes) -> list[tuple[str, int, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info.name, info.offset_data, data[info.offset_data :][: info.size]) for info in tar if info.isreg()]


def told(rows: Rows, data: bytes) -> list[tuple[str, int, bytes]]:
    keys = np.repeat(rows.keys, np.diff(rows.starts)).tolist()
    return [
        (f"{key.decode()}.{rows.fields[field]}", offset, data[offset : offset + size])
        for key, field, offset, size in zip(
            keys, rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True
        )
    ]


def checksums(data: bytes) -> list[int]:
    return [google_crc32c.value(body) for _, _, body in by_tarfile(data)]


def run(build: Callable[[Reader], Coroutine[Any, Any, Any]], **storage_options: Any) -> Any:
    async def with_a_reader() -> Any:
        options = Fetch(hedge_share=0)  # requests are counted
        async with Reader(options, concurrency=8, storage_options=storage_options) as reader:
            return await build(reader)

    return asyncio.run(with_a_reader())


def build(urls: Sequence[str], place: Any, **options: Any) -> BuildProgress:
    progress: BuildProgress = run(lambda reader: build_index(reader, urls, place, **options))
    return progress


def index_of(url: str, **options: Any) -> ShardIndex:
    index = run(lambda reader: build_shard(reader, url, **options))
    assert isinstance(index, ShardIndex)
    return index


def in_memory(name: str, data: bytes) -> str:
    url = f"memory://indexing/{name}"
    memory.put(url, data)
    return url


def blocks(data: bytes) -> tuple[Directory, list[ShardIndex]]:
    directory = read_directory(data)
    shards = []
    for at, name in enumerate(directory.names):
        start, stop, check = directory.block(at)
        check_block(data[start:stop], check, name)
        shards.append(ShardIndex.unpack(data[start:stop], name))
    return directory, shards


def same(a: ShardIndex, b: ShardIndex) -> bool:
    return (a.pack(), a.size, a.etag) == (b.pack(), b.size, b.etag)


@pytest.fixture(scope="module")
def s3(leaves: Any) -> Iterator[Any]:
    with client_of("shelf") as client:
        yield client


# One shard


def test_headers_alone_are_read_where_members_are_long() -> None:
    url = in_memory("long.tar", LARGE)

    async def metered(reader: Reader) -> None:
        index = await build_shard(reader, url, headers_only=True)
        assert told(index.rows, LARGE) == by_tarfile(LARGE)
        assert index.crc is None
        assert reader.meter.bytes <= 0.02 * len(LARGE)
        assert reader.meter.requests <= 1.1 * 120  # one a sample

    run(metered)


def test_all_is_read_after_all_where_members_are_short() -> None:
    with FaultServer() as server:
        url = server.add("a.tar", SMALL)
        reads = list[int]()
        index = run(lambda reader: build_shard(reader, url, headers_only=True, on_bytes=reads.append))
        assert index.crc is not None
        assert index.crc.tolist() == checksums(SMALL)
        assert told(index.rows, SMALL) == by_tarfile(SMALL)
        assert sum(reads) <= 1.1 * len(SMALL)
        assert len(server.log) <= 10


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.one_of(st.integers(0, 3000), st.integers(60_000, 140_000)), min_size=1, max_size=60),
    kind=st.sampled_from(sorted(FORMATS)),
    long_names=st.booleans(),
)
def test_headers_tell_the_same_as_the_whole(sizes: list[int], kind: str, long_names: bool) -> None:
    folder = "d" * (120 if long_names and kind != "ustar" else 3)
    data = tar(
        [(f"{folder}/{n:04d}", {"bin": random.Random(n).randbytes(size)}) for n, size in enumerate(sizes)],
        FORMATS[kind],
    )
    url = in_memory("any.tar", data)
    whole, by_headers = index_of(url), index_of(url, headers_only=True)
    assert told(by_headers.rows, data) == told(whole.rows, data) == by_tarfile(data)


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "tar.lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
}


DAMAGED: dict[str, tuple[str, Callable[[], bytes], str]] = {  # name, body, text of the error
    "empty": ("tar", lambda: b"", r"damaged\.tar"),
    "half": ("tar", lambda: LARGE[: len(LARGE) // 2], r"damaged\.tar"),
    "no end": ("tar", lambda: LARGE[:-10_240], r"damaged\.tar"),  # neither padding nor end mark
    "no body": ("tar", lambda: LARGE[: by_tarfile(LARGE)[-1][1]], r"damaged\.tar"),
    "header": ("tar", lambda: with_byte(LARGE, by_tarfile(LARGE)[-20][1] - 512, ord("?")), r"damaged\.tar"),
    "gzip": ("tar", lambda: gzip.compress(LARGE), r"damaged\.tar"),
    "wrong seek table": (
        "tar.zst",
        lambda: with_byte(in_frames(SMALL, 100_000), -13, 0),
        "seek table",
    ),  # size of a frame
    **{f"cut {end}": (end, lambda pack=pack: pack(SMALL)[:-1], "truncated") for end, pack in COMPRESSED.items()},
}


def with_byte(data: bytes, at: int, byte: int) -> bytes:
    return data[:at] + bytes([byte]) + data[at:][1:]


@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_shard_is_refused(damage: str, headers_only: bool) -> None:
    ending, make, text = DAMAGED[damage]
    url = in_memory(f"damaged.{ending}", make())
    with pytest.raises(FormatError, match=text) as caught:
        index_of(url, headers_only=headers_only)
    assert caught.value.url == url


def test_shard_that_is_replaced_while_it_is_read_is_refused() -> None:
    with FaultServer() as server:
        url = server.add("a.tar", LARGE, "replaced:range=bytes=8388608")
        with pytest.raises(ObjectChangedError):
            index_of(url)


@pytest.mark.slow
@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_shard_is_indexed_by_what_comes_out_of_it(ending: str, headers_only: bool) -> None:
    packed = COMPRESSED[ending](MEDIUM)
    index = index_of(in_memory(f"a.{ending}", packed), headers_only=headers_only)
    assert told(index.rows, MEDIUM) == by_tarfile(MEDIUM)
    assert index.crc is not None
    assert index.crc.tolist() == checksums(MEDIUM)
    assert index.frames is not None
    assert (index.size, index.frames.packed.tolist()) == (len(packed), [0, len(packed)])
    assert index.frames.unpacked.tolist() == [0, len(MEDIUM)]
    assert same(ShardIndex.unpack(index.pack(), "a"), index)


def test_frames_of_a_seekable_shard_are_indexed() -> None:
    packed = in_frames(SMALL, 100_000)
    index = index_of(in_memory("a.tar.zst", packed))
    assert told(index.rows, SMALL) == by_tarfile(SMALL)
    assert index.frames is not None
    unpack = zstandard.ZstdDecompressor().decompress
    bounds = itertools.pairwise(index.frames.packed.tolist())
    parts = [unpack(packed[start:stop], 2**20) for start, stop in bounds]
    assert b"".join(parts) == SMALL
    assert np.diff(index.frames.unpacked).tolist() == [len(part) for part in parts]
    assert len(parts) > 5


# One file for many


def test_index_file_holds_all_shards_in_their_order(tmp_path: Path) -> None:
    sizes = [SMALL, LARGE, SMALL]
    with FaultServer() as server:
        urls = [server.add(f"{k}.tar", data) for k, data in enumerate(sizes)]
        place = tmp_path / "new" / "all.hri"
        progress = build([*urls, urls[0]], place)
        directory, shards = blocks(place.read_bytes())
        assert list(directory.names) == urls
        assert directory.samples.tolist() == [400, 120, 400]
        assert directory.members.tolist() == [800, 240, 800]
        assert directory.sizes.tolist() == [len(data) for data in sizes]
        assert [told(index.rows, data) for index, data in zip(shards, sizes, strict=True)] == [
            by_tarfile(data) for data in sizes
        ]
        assert [index.crc.tolist() for index in shards if index.crc is not None] == list(map(checksums, sizes))
        assert progress.index_bytes == place.stat().st_size
        assert progress.nbytes == progress.seen_bytes == sum(len(data) for data in sizes)
        assert [path.name for path in place.parent.iterdir()] == ["all.hri"]


def test_shards_that_are_done_are_not_read_again_when_one_has_failed(tmp_path: Path) -> None:
    place = tmp_path / "all.hri"
    with FaultServer() as server:
        urls = [server.add(f"{k}.tar", tar(numbered_samples(50 * k, 50, 1000))) for k in range(4)]
        server.add("2.tar", SMALL[:-20_000])
        progress = build(urls, place)
        assert list(progress.failures) == [urls[2]]
        assert "2.tar" in str(progress.failures[urls[2]])
        assert not place.exists()
        server.add("2.tar", SMALL)
        server.add("3.tar", tar(numbered_samples(0, 60, 1000)))  # which has changed meanwhile
        server.log.clear()
        progress = build(urls, place)
        assert not progress.failures
        assert progress.kept == 2
        assert [request.range for name in ("0.tar", "1.tar") for request in server.requests_for(name)] == [
            "bytes=0-0",
            "bytes=0-0",
        ]
        directory, shards = blocks(place.read_bytes())
        assert directory.samples.tolist() == [50, 50, 400, 60]
        assert all(same(kept, index_of(url)) for kept, url in zip(shards, urls, strict=True))


def test_what_was_indexed_without_checksums_is_not_taken_where_they_are_wanted(tmp_path: Path) -> None:
    place = tmp_path / "all.hri"
    urls = [in_memory("long.tar", LARGE), in_memory("bad.tar", b"")]
    assert build(urls, place, headers_only=True).failures
    memory.put(urls[1], SMALL)
    progress = build(urls, place)
    assert progress.kept == 0
    assert all(index.crc is not None for index in blocks(place.read_bytes())[1])


def test_journal_that_is_torn_is_cut_and_gone_on_with(tmp_path: Path) -> None:
    place = tmp_path / "all.hri"
    urls = [in_memory(f"torn-{k}.tar", tar(numbered_samples(0, 30, 500))) for k in range(3)]
    urls.append(in_memory("torn-bad.tar", b""))
    build(urls, place, concurrency=1)
    journal = tmp_path / "all.hri.journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    memory.put(urls[3], SMALL)
    progress = build(urls, place, concurrency=1)
    assert progress.kept == 2
    assert blocks(place.read_bytes())[0].samples.tolist() == [30, 30, 30, 400]
    assert not journal.exists()


def test_index_has_no_secrets_and_tells_addresses_apart(tmp_path: Path) -> None:
    with FaultServer() as server:
        url = f"{server.add('a.tar', SMALL)}?X-Amz-Signature=abcdef&part=1"
        build([url], tmp_path / "a.hri")
        directory, _ = blocks((tmp_path / "a.hri").read_bytes())
        assert "abcdef" not in directory.names[0]
        assert directory.find(url) == 0
        other = url.replace("abcdef", "ghijkl")
        with pytest.raises(OptionError, match="secret"):
            build([url, other], tmp_path / "b.hri")


# Two at once


def test_missing_file_is_built_once_for_all_who_want_it(tmp_path: Path) -> None:
    place = tmp_path / "all.hri"

    async def thrice(reader: Reader, urls: list[str]) -> None:
        await asyncio.gather(*(build_file(reader, urls, place) for _ in range(3)))

    with FaultServer() as server:
        urls = [server.add(f"{k}.tar", SMALL) for k in range(2)]
        run(lambda reader: thrice(reader, urls))
        asked = len(server.log)
        assert sum(request.range == f"bytes=0-{len(SMALL) - 1}" for request in server.log) == 2
        run(lambda reader: build_file(reader, urls, place))
        assert len(server.log) == asked
    assert blocks(place.read_bytes())[0].samples.tolist() == [400, 400]
    assert [path.name for path in tmp_path.glob("all*")] == ["all.hri"]


def test_missing_file_is_not_built_of_shards_that_fail(tmp_path: Path) -> None:
    urls = [in_memory("fine.tar", SMALL), in_memory("empty.tar", b"")]
    with pytest.raises(FormatError, match=r"empty\.tar"):
        run(lambda reader: build_file(reader, urls, tmp_path / "a.hri"))
    assert not (tmp_path / "a.hri").exists()


# Where it goes


@OBSTORE_KEEPS
def test_index_is_written_to_s3_and_beside_its_shards(s3: Any) -> None:
    options = {**CREDENTIALS, "endpoint": s3.meta.endpoint_url}
    urls = [f"s3://shelf/train/{k} a.tar" for k in range(3)]
    for k in range(3):
        s3.put_object(Bucket="shelf", Key=f"train/{k} a.tar", Body=tar(numbered_samples(0, 20 + k, 500)))

    def body(key: str) -> bytes:
        found: bytes = s3.get_object(Bucket="shelf", Key=key)["Body"].read()
        return found

    run(lambda reader: build_index(reader, urls, "s3://shelf/train/all.hri", storage_options=options), **options)
    directory, shards = blocks(body("train/all.hri"))
    assert (list(directory.names), directory.samples.tolist()) == (urls, [20, 21, 22])
    assert shards[0].etag == s3.head_object(Bucket="shelf", Key="train/0 a.tar")["ETag"]
    run(lambda reader: build_index(reader, urls, None, storage_options=options), **options)
    for k, url in enumerate(urls):
        directory, (index,) = blocks(body(f"train/{k} a.tar.hri"))
        assert (list(directory.names), len(index.rows)) == ([url], 20 + k)


@OBSTORE_KEEPS
def test_index_that_cannot_be_uploaded_is_an_error_and_what_is_done_is_kept(s3: Any) -> None:
    options = {**CREDENTIALS, "endpoint": s3.meta.endpoint_url}
    url = in_memory("kept.tar", SMALL)
    output = "s3://other-shelf/all.hri"
    with pytest.raises(StorageError, match="other-shelf"):
        build([url], output, storage_options=options)
    s3.create_bucket(Bucket="other-shelf")
    progress = build([url], output, storage_options=options)
    assert progress.kept == 1


@pytest.mark.parametrize("scheme", ["memory", "local", ""], ids=["memory", "fsspec", "path"])
def test_object_is_written_to_every_kind_of_store(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/there" if scheme else f"{tmp_path}/folder/there"
    source = tmp_path / "source"
    for text in (b"first", b"second"):
        source.write_bytes(text)
        asyncio.run(write_object(url, source))
        assert run(lambda reader: reader.read(url)) == text
    assert source.exists()


@pytest.mark.parametrize("output", ["http://127.0.0.1:1/a.hri", "https://x/a.hri", "pipe:cat"])
def test_index_cannot_be_written_where_only_reading_is_possible(output: str) -> None:
    with pytest.raises(OptionError, match="cannot be written to"):
        build([in_memory("a.tar", SMALL)], output)


def test_index_beside_a_shard_keeps_the_query_behind_it() -> None:
    assert beside("https://host/a.tar?versionId=1") == "https://host/a.tar.hri?versionId=1"
    assert beside("s3://bucket/a?.tar") == "s3://bucket/a?.tar.hri"
    assert beside("/data/a.tar") == "/data/a.tar.hri"


@pytest.mark.slow
def test_cached_index_depends_on_folders_not_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = [cache_path([f"https://host/a.tar?X-Amz-Signature={n}"]) for n in range(2)]
    assert signed[0] == signed[1]
    assert signed[0].is_relative_to(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    here = cache_path(["a.tar"])
    assert here == cache_path([str(tmp_path / "a.tar")])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert cache_path(["a.tar"]) != here
    assert cache_path(["a.tar", "b.tar"]) != cache_path(["b.tar", "a.tar"])
    stores: list[Any] = [None, {"endpoint": "http://a"}, {"endpoint": "http://b"}]
    places = [cache_path(["s3://b/0.tar"], options) for options in stores]
    assert len(set(places)) == 3
    assert cache_path(["s3://b/0.tar"], {"secret_access_key": "x"}) == places[0]
