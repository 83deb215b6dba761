"""Shards of all packings: samples of plain ones on any ranks, alone and combined, damage, limits and indexes."""

import asyncio
import bz2
import gzip
import io
import itertools
import json
import lzma
import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from builders.loops import flat, loaded, outcomes, rest_of, resumed_anywhere, state_after
from builders.seekable import in_frames
from builders.tars import index_file, number_of, numbered_samples, tar

import headrace as hr
from headrace.fetch import Reader
from headrace.fetch.stores import memory
from headrace.formats.index import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.indexes.building import build_shard
from headrace.sources import bodies
from headrace.sources.shards import IndexedShards
from headrace.testing import FaultServer
from headrace.testing.decoders import same

pytestmark = pytest.mark.usefixtures("warm_server")

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
}
SMALL = hr.Fetch(range_bytes=4096)


def is_third(key: str) -> bool:
    return int(key) % 3 == 0


def put_shard(data: bytes, ending: str) -> str:
    url = f"memory://{uuid.uuid4().hex}/0.{ending}"
    memory.put(url, data)
    return url


def built_index(url: str, limits: Limits = DEFAULTS) -> ShardIndex:
    async def build() -> ShardIndex:
        async with Reader(concurrency=1) as reader:
            return await build_shard(reader, url, limits=limits)

    return asyncio.run(build())


def test_operators_that_take_samples_from_anywhere_refuse_compressed_shards_at_once(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(b'{"input_ids": [1]}\n' * 3))
    data = hr.stream(f"{tmp_path}/*.jsonl.gz", index="build")
    operators: list[Callable[[], object]] = [
        lambda: data.shuffle().pack(8),
        lambda: data.pack(8, lengths=[1] * 6),
        lambda: hr.mix({"a": data.shuffle(), "b": data}),
        lambda: hr.mix({"a": data, "b": data}).sample([0, 1]),
        lambda: data.concat(data).shuffle(),
        lambda: data.zip(data).shuffle("global"),
        lambda: data.join(data, on="__key__"),
        lambda: data.take(4).shuffle(),
        lambda: data.sample(count=3),
        lambda: data.sample([5, 4]),
        lambda: data.shuffle("global"),
        lambda: hr.stream(f"{tmp_path}/*.jsonl.gz", index=None).shuffle("global"),
        lambda: data.cache(),
    ]
    remedy = r"0\.jsonl\.gz can only .*by='window' without \.pack\(\), .* `headrace pack URL… FOLDER --format parquet`"
    for operator in operators:
        with pytest.raises(hr.OptionError, match=remedy):
            operator()
    assert len(list(hr.DataLoader(data.shuffle("window"), batch_size=2))) == 3
    unread = hr.stream("memory://compressed/never-read.tar.gz", index="beside")
    with pytest.raises(hr.OptionError, match=r"or compressed ones: .*by='window'"):
        unread.shuffle("within")
    unread.repeat(2).take(3)
    unread.take(3).slice(1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_compressed_shards_with_an_index_are_read_in_order_and_filtered(kind: str) -> None:
    url = put_shard(PACK[kind](tar(numbered_samples(0, 9))), f"tar.{kind}")
    memory.put(f"{url}.hri", index_file([(url, built_index(url))]))
    data, plain = hr.stream(url, index="beside"), hr.stream(url, index=None)
    for use in (
        lambda data: data,
        lambda data: data.shuffle("window", window=4, seed=1),
        lambda data: data.filter(is_third, field="__key__"),
        lambda data: data.filter(is_third, field="__key__").select("cls"),
        lambda data: data.to_tuple("__key__"),
    ):
        assert list(use(data)) == list(use(plain))
    assert len(data) == 9
    keys = list(data.keys())
    assert keys == [f"{n:06d}" for n in range(9)]
    assert list(data.slice(2, 8, 2).to_tuple("__key__")) == [(key,) for key in keys[2:8:2]]
    assert [data[n] for n in (3, 7, 0)] == [list(plain)[n] for n in (3, 7, 0)]
    assert [sample["__key__"] for sample in data.take(3).epoch(samples=8)] == (keys[:3] * 3)[:8]


def serve(server: FaultServer, *faults: str, piece: int = 2000) -> tuple[hr.Stream, ShardIndex, str]:
    """A stream of a seekable shard with these faults, its index and its name."""
    name = f"{uuid.uuid4().hex}.tar.zst"
    packed = in_frames(tar(numbered_samples(0, 20)), piece, own=True)
    url = server.add(name, packed)
    index = built_index(url)
    place = put_shard(index_file([(url, index)]), "hri")
    server.add(name, packed, *faults)
    server.log.clear()
    return hr.stream(url, index=place), index, name


def test_frames_that_were_wrong_once_are_asked_for_once_more(server: FaultServer) -> None:
    data, _, name = serve(server, "flip:first=1")
    for n in (0, 7, 19):
        server.log.clear()
        assert data[n]["cls"] == str(n).encode()
        assert [request.faults for request in server.requests_for(name)] == [("flip",), ()]


def test_frames_that_are_wrong_for_good_are_an_error_of_their_sample(server: FaultServer) -> None:
    data, _, name = serve(server)
    packed = bytearray(server.objects[name])
    packed[30] ^= 1
    server.add(name, bytes(packed))
    with pytest.raises(hr.errors.ChecksumError, match="index") as caught:
        data[0]
    assert caught.value.key == "000000"
    assert data[19]["cls"] == b"19"


def test_an_index_that_headers_in_frames_contradict_is_an_error(server: FaultServer) -> None:
    _, index, name = serve(server)
    exchanged = replace(index, rows=replace(index.rows, fields=index.rows.fields[::-1]))
    place = put_shard(index_file([(f"{server.url}/{name}", exchanged)]), "hri")
    with pytest.raises(hr.errors.ObjectChangedError, match=r"'000003\.bin' of 1 bytes .* '000003\.cls'"):
        hr.stream(f"{server.url}/{name}", index=place)[3]


def test_frames_are_unpacked_once_for_all_their_samples(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, index, _ = serve(server, piece=20_000)
    unpacked: list[int] = []
    unpack = bodies.unpack_frame

    def counted(data: bytes, size: int, limits: Limits, *, url: str) -> bytes:
        unpacked.append(size)
        return unpack(data, size, limits, url=url)

    monkeypatch.setattr(bodies, "unpack_frame", counted)
    assert index.frames is not None
    count = len(index.rows)
    samples = loaded(stream.sample(range(count)), batch_size=None, collate_fn=lambda sample: sample)
    assert [sample["__key__"] for sample in samples] == [key.decode() for key in index.rows.keys]
    frames = len(index.frames.packed) - 1
    assert len(unpacked) <= 3 * (frames - 1) + 1 < count  # two more where a sample spans two frames


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("workers", [0, 2])
def test_compressed_shards_give_the_batches_of_plain_ones(ending: str, workers: int) -> None:
    whole = tar(numbered_samples(0, 90))
    half = len(whole) // 3
    packed = put_shard(PACK[ending](whole[:half]) + PACK[ending](whole[half:]), f"tar.{ending}")
    plain = put_shard(whole, "tar")
    options: dict[str, Any] = {"batch_size": 16, "num_workers": workers, "fetch": SMALL}
    for order in (lambda data: data, lambda data: data.shuffle(seed=3)):
        streams = [order(hr.stream([url, url])).decode().select("bin", "cls") for url in (packed, plain)]
        left, right = (outcomes(stream.map(without_url), **options) for stream in streams)
        assert len(left) == 12
        assert same(left, right)


def without_url(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "__url__"}


@pytest.mark.parametrize("ending", PACK)
def test_zeros_that_follow_the_end_of_an_archive_are_no_bomb(ending: str) -> None:
    limits = hr.Limits(unpacked_free_bytes=4 * 2**20)
    url = put_shard(PACK[ending](tar(numbered_samples(0, 3)) + bytes(40 * 2**20)), f"tar.{ending}")
    assert [sample["__key__"] for sample in hr.stream(url, limits=limits)] == ["000000", "000001", "000002"]
    assert len(built_index(url, limits).rows) == 3


@pytest.mark.parametrize("ending", ["bz2", "xz", "zst"])
def test_zeros_in_members_and_members_after_zeros_are_a_bomb(ending: str) -> None:
    limits = hr.Limits(unpacked_free_bytes=2**20)
    zeros = bytes(40 * 2**20)
    for whole in (tar([("a", {"bin": zeros})]), tar([("a", {"bin": b"x"})]) + zeros + b"x" * 2**22):
        url = put_shard(PACK[ending](whole), f"tar.{ending}")
        assert isinstance(outcomes(hr.stream(url, limits=limits), batch_size=None)[-1], hr.errors.LimitError)
        with pytest.raises(hr.errors.LimitError):
            built_index(url, limits)


@pytest.mark.parametrize("ending", ["", *PACK])
def test_member_that_is_too_large_fails_by_its_own_limit_also_where_it_is_a_bomb(ending: str) -> None:
    limits = hr.Limits(unpacked_free_bytes=2**20, unpacked_ratio=10, member_bytes=2**20)
    whole = tar([("a", {"bin": b"x"}), ("b", {"bin": bytes(2**24)})])
    url = put_shard(PACK[ending](whole) if ending else whole, f"tar.{ending}".rstrip("."))
    sample, error = outcomes(hr.stream(url, limits=limits), batch_size=None)
    assert sample["__key__"] == "a"
    expected = r"^the size of the member 'b\.bin' is 16777216 bytes, over the limit of 1048576 "
    assert re.match(expected, str(error))
    with pytest.raises(hr.errors.LimitError, match=expected):
        built_index(url, limits)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2**20, 3 * 2**20, 2**24, "auto"])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("workers", [0, 2])
def test_any_memory_budget_is_enough(budget: Any, window: int | None, workers: int) -> None:
    shards = [[(f"{s}{n:03d}", {"bin": bytes(40_000 + n) + b"%d" % n}) for n in range(80)] for s in range(4)]
    urls = [put_shard(gzip.compress(tar(samples), 1), "tar.gz") for samples in shards]
    data = hr.stream(urls).to_tuple("__key__", "bin")
    if window is not None:
        data = data.shuffle("window", window=window, seed=1)
    options = {"batch_size": 100, "collate_fn": list, "timeout": 20, "fetch": hr.Fetch(range_bytes=65536)}
    keys = [key for batch in outcomes(data, memory_budget=budget, num_workers=workers, **options) for key, _ in batch]
    assert sorted(keys) == [key for samples in shards for key, _ in samples]
    assert (keys == sorted(keys)) == (window is None)


@pytest.mark.slow
def test_first_batches_that_are_larger_than_what_is_read_ahead_come() -> None:
    members = np.random.default_rng(0).integers(0, 16, (200, 120_000), np.uint8)
    archive = tar([(f"{n:03d}", {"bin": member.tobytes()}) for n, member in enumerate(members)])
    data = hr.stream([put_shard(gzip.compress(archive, 1), "tar.gz")] * 5).to_tuple("bin")
    assert [len(batch) for batch in outcomes(data, batch_size=500, collate_fn=list, timeout=30)] == [500, 500]


@pytest.mark.parametrize("by_key", [False, True])
def test_a_replaced_shard_is_not_read_by_an_old_index(by_key: bool) -> None:
    url = put_shard(gzip.compress(tar(numbered_samples(0, 20))), "tar.gz")
    data = hr.stream(url, index="build")
    assert len(data) == 20
    memory.put(url, gzip.compress(tar(numbered_samples(0, 9))))
    data = data.filter(lambda key: key != "x", field="__key__") if by_key else data
    assert isinstance(outcomes(data, batch_size=8)[0], hr.errors.ObjectChangedError)


COUNTS = (11, 0, 7, 1, 13)
TOTAL = sum(COUNTS)


def lines(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"cls": n, "text": "x" * (n % 5)}).encode() + b"\n" for n in range(first, first + count))


def tarred(first: int, count: int) -> bytes:
    return tar(numbered_samples(first, count))


def table(first: int, count: int) -> bytes:
    rows = pa.table({"cls": pa.array(range(first, first + count), pa.int64())})
    pq.write_table(rows, data := io.BytesIO(), row_group_size=4)
    return data.getvalue()


SCANNED: dict[str, Callable[[int, int], bytes]] = {
    "jsonl": lines,
    "jsonl.gz": lambda *shard: gzip.compress(lines(*shard)),
    "jsonl.zst": lambda *shard: zstandard.compress(lines(*shard)),
    "frames.jsonl.zst": lambda *shard: in_frames(lines(*shard), 100),
    "tar": tarred,
    "tar.gz": lambda *shard: gzip.compress(tarred(*shard)),
}
KINDS = SCANNED | {"parquet": table}


def shards(folder: Path, kind: str) -> list[str]:
    urls = [str(folder / f"{number}.{kind}") for number in range(len(COUNTS))]
    for url, first, count in zip(urls, itertools.accumulate(COUNTS, initial=0), COUNTS, strict=False):
        Path(url).write_bytes(KINDS[kind](first, count))
    return urls


Halves = tuple[hr.Stream, hr.Stream]  # the samples of the first three shards, and of the others


def halves(urls: Sequence[str], index: Any = "auto") -> Halves:
    index = "auto" if urls[0].endswith("parquet") else index
    return hr.stream(urls[:3], index=index).map(number_of), hr.stream(urls[3:], index=index).map(number_of)


def mixed(of: Halves) -> hr.Stream:
    return hr.mix({"a": of[0], "b": of[1]}, {"a": 18, "b": 14})


USES: dict[str, tuple[Callable[[Halves], hr.Stream], Sequence[int]]] = {
    "concat": (lambda of: of[0].concat(of[1]), range(TOTAL)),
    "interleave": (lambda of: of[0].interleave(of[1], block=3), range(TOTAL)),
    "mix": (mixed, range(TOTAL)),
    "zip": (lambda of: of[0].zip(of[1], strict=False).map(sum), range(18, 18 + 2 * 14, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_combined_shards_are_exact(kind: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls, (combined, expected) = shards(tmp_path, kind), USES[use]
    for index, world in ((None, 1), (None, 2), ("build", 2)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{index}{world}"))
        assert each_once(combined(halves(urls, index)), world) == Counter(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_combined_shards_are_read_together(
    kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = halves(shards(tmp_path, kind), "build")
    monkeypatch.delattr(IndexedShards, "get")  # of one sample
    for (combined, expected), workers in itertools.product((USES["mix"], USES["zip"]), (0, 1)):
        assert Counter(loaded(combined(of), batch_size=None, num_workers=workers)) == Counter(expected)


def test_rows_are_sent_to_workers_without_their_block(tmp_path: Path) -> None:
    text = pa.array([bytes([n]) * 20_000 for n in range(200)])
    pq.write_table(pa.table({"text": text}), tmp_path / "0.parquet", compression=None, use_dictionary=False)
    data = hr.stream(tmp_path / "0.parquet")
    some = hr.stream(tmp_path / "0.parquet", format=hr.Parquet(where=[("text", ">=", b"\x06")]))
    for order, count in ((data.zip(data), 200), (some.shuffle("global"), 194)):
        with hr.DataLoader(order.map(repr), batch_size=4, collate_fn=list, num_workers=1) as loader:
            assert len(set(flat(loader))) == count
            assert loader.stats().shared_bytes < 50e6  # a block has 4 MB


@pytest.mark.parametrize("kind", ["tar.gz", "frames.jsonl.zst", "parquet"])
def test_damage_in_combined_shards_is_an_error_of_its_samples(kind: str, tmp_path: Path, cache: Path) -> None:
    urls = shards(tmp_path, kind)
    assert [len(list(half)) for half in halves(urls, "build")] == [18, 14]  # the indexes are of undamaged shards
    data = bytearray(Path(urls[4]).read_bytes())
    at = {"parquet": 12, "tar.gz": len(data) // 2, "frames.jsonl.zst": data.rfind(b"\x28\xb5\x2f\xfd")}
    data[at[kind]] ^= 255
    Path(urls[4]).write_bytes(data)
    came = outcomes(halves(urls)[0].concat(halves(urls)[1]), batch_size=None)
    alone = outcomes(hr.from_map(range(14)).map(halves(urls)[1].aget), batch_size=None)
    assert [*map(repr, came[:18])] == [*map(repr, range(18))]
    assert [*map(type, came[18:])] == [*map(type, alone)]
    assert 0 < sum(isinstance(one, Exception) for one in came) < 14


def each_once(data: hr.Stream, world: int) -> Counter[int]:
    parts = []
    for rank in range(world):
        options: dict[str, Any] = {"ranks": hr.Ranks(global_batch_size=6, rank=rank, world_size=world)}
        (part,) = resumed_anywhere(lambda options=options: hr.DataLoader(data, **options), most=3)
        parts.append(part)
    assert len(set(map(len, parts))) == 1
    return Counter(itertools.chain(*itertools.chain(*parts)))


@pytest.mark.parametrize("kind", SCANNED)
def test_unindexed_shards_are_exact_on_two_ranks(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = hr.stream(shards(tmp_path, kind), index=None)
    for order in (data, data.shuffle(window=5), data.take(TOTAL)):
        assert each_once(order.map(number_of), 2) == Counter(range(TOTAL))
    assert "2 ranks share an index of the shards" in caplog.text
    assert "`headrace index` makes it once for all" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "frames.jsonl.zst", "tar"])
def test_global_shuffle_makes_an_index(
    kind: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = hr.stream(shards(tmp_path, kind), index=None).shuffle("global").map(number_of)
    assert not list(cache.glob("headrace/indexes/*.hri"))  # before anything is read
    (message,) = [record.message for record in caplog.records]
    for world in (1, 2):
        assert each_once(data, world) == Counter(range(TOTAL))
    assert [record.message for record in caplog.records] == [message]
    assert "needs an index of the shards" in message
    assert "`headrace index`" in message


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "frames.jsonl.zst"])
def test_packed_documents_of_compressed_shards_are_those_of_plain_ones(kind: str, tmp_path: Path) -> None:
    packed = [
        hr.stream(shards(tmp_path, each), index=index).tokenize(lambda text: [1, *text.encode()]).pack(4)
        for each, index in (("jsonl", "build"), (kind, None))
    ]
    options: dict[str, Any] = {"batch_size": 2, "drop_last": True}
    plain, compressed = (resumed_anywhere(lambda data=data: hr.DataLoader(data, **options), most=4) for data in packed)
    assert plain == compressed


def test_ranks_that_mix_compressed_shards_resume_as_fewer(tmp_path: Path) -> None:
    data = mixed(halves(shards(tmp_path, "jsonl.gz")))
    two = [hr.Ranks(global_batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    state = state_after(hr.DataLoader(data, ranks=two[0]), 3)
    rest = flat(rest_of(hr.DataLoader(data, ranks=hr.Ranks(global_batch_size=6), collate_fn=list), state))
    first = flat(flat(loaded(data, ranks=ranks, collate_fn=list))[:9] for ranks in two)
    assert Counter(rest) == Counter(range(TOTAL)) - Counter(first)


MANY = 20_000  # lines of some 100 bytes each


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> hr.Stream:
    monkeypatch.setattr(bodies, "_SHARD_BYTES", 2**16)
    body = b"".join(b'{"cls": %d, "text": "%s"}\n' % (n, b"x" * 80) for n in range(MANY))
    memory.put("memory://in-order/large.jsonl.gz", gzip.compress(body, 1))
    return hr.stream("memory://in-order/large.jsonl.gz", index="build").map(number_of)


def test_distant_positions_are_unpacked_once_each(large: hr.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Counted(bodies._Unpacking):
        def __init__(self, *args: Any) -> None:
            started.append(args)
            super().__init__(*args)

    monkeypatch.setattr(bodies, "_Unpacking", Counted)
    apart = {str(k): large.skip(MANY // 5 * k) for k in range(3)}
    with hr.DataLoader(hr.mix(apart, dict.fromkeys("012", 1))) as loader:
        found = [int(n) for batch in itertools.islice(loader, 3000) for n in batch]
    assert sorted(found) == sorted(MANY // 5 * k + n for k in range(3) for n in range(1000))
    assert len(started) <= 6


def test_random_access_to_large_compressed_shards_is_refused(large: hr.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_STEP_BYTES", 2**15)
    monkeypatch.setattr(bodies, "_JUMPS_MOST", 3)

    async def get() -> None:
        for n in (MANY - 1, MANY // 2, MANY // 3, MANY // 4, MANY // 5):
            assert await large.aget(n) == n

    with pytest.raises(hr.OptionError, match=r"random places, and it can only be unpacked from its start.*`headrace"):
        asyncio.run(get())
