"""Index files round-trip; damaged and hostile ones, and tables that no shard can have, are refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.numbers import peak_of
from builders.rows import listed_index
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError
from headrace.formats import index as named_arrays
from headrace.formats.compression import Frames
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index import (
    HEAD,
    MAGIC,
    Entry,
    ShardIndex,
    check_block,
    pack_arrays,
    pack_directory,
    read_directory,
    read_head,
    smallest,
    unpack_arrays,
)
from headrace.formats.limits import DEFAULTS
from headrace.indexes.building import index_of_one, read_journal, write_index
from headrace.indexes.index import HeldReads, OwnTables

GOLDEN = Path(__file__).parent / "golden" / "index_v1.txt"
WHAT = "s3://bucket/train.idx?X-Amz-Signature=abc"


def checked(rest: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(rest)) + rest


def sealed_as(length: int, body: bytes) -> bytes:
    return checked(struct.pack("<I", length) + zlib.compress(body))


def sealed(body: bytes) -> bytes:
    return sealed_as(len(body), body)


def container(header: dict[str, Any], raw: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return sealed(struct.pack("<I", len(text)) + text + raw)


def shard(
    keys: list[bytes], starts: list[int], field: list[int], offsets: list[int], sizes: list[int], **more: Any
) -> ShardIndex:
    numbers = [np.array(values) for values in (starts, offsets, sizes)]
    rows = Rows(np.array(keys), numbers[0], np.array(field, np.int32), *numbers[1:], ("jpg", "ünï", "bad\udcff"))
    return ShardIndex(rows, **{"crc": None, "size": -1, "etag": None, **more})


CRC = np.array([11, 12, 13], np.uint32)
SMALL = shard([b"a/0", b"a/1"], [0, 2, 3], [0, 1, 0], [512, 2048, 3072], [700, 1, 900], crc=CRC, size=5120, etag='"e"')
LARGE = shard([b"", b"k"], [0, 0, 2], [2, 0], [2**41, 2**42], [2**32, 0], etag="é")
FRAMES = Frames(np.array([0, 30, 50]), np.array([0, 3000, 6000]))
FACTS: dict[str, Any] = {"size": 4096, "etag": None, "fields": ["jpg", "cls"]}
ARRAYS = {
    "key_length": [1, 2],
    "key_text": list(b"abb"),
    "members": [2, 1],
    "field": [0, 1, 0],
    "size": [700, 1, 900],
    "gap": [1, 1, 1],
}


def changed(facts: dict[str, Any] | None = None, **arrays: list[int]) -> bytes:
    numbers = {name: np.array(values, np.uint64) for name, values in {**ARRAYS, **arrays}.items()}
    return pack_arrays({**FACTS, **(facts or {})}, numbers)


def damaged(data: st.DataObject, packed: bytes, first: int = 0) -> bytearray:
    """Change a byte at `first` or later, or cut the end off there."""
    broken, at = bytearray(packed), data.draw(st.integers(first, len(packed) - 1))
    if data.draw(st.booleans()):
        broken[at] ^= data.draw(st.integers(1, 255))
    else:
        del broken[at:]
    return broken


# One shard


@pytest.mark.parametrize("index", [SMALL, LARGE, replace(SMALL, size=60, frames=FRAMES)])
def test_unpack_gives_what_was_packed(index: ShardIndex) -> None:
    found = ShardIndex.unpack(index.pack(), WHAT)
    assert listed_index(found) == listed_index(index)
    assert (found.rows.starts.dtype, found.rows.field.dtype, found.rows.size.dtype) == (np.int64, np.int32, np.int64)


def test_pack_is_readable_again_when_it_compresses_like_a_bomb() -> None:
    count = 400_000
    starts, none = np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    rows = Rows(np.full(count, b"key"), starts, none.astype(np.int32), none, none, ())
    assert len(ShardIndex.unpack(ShardIndex(rows, None, -1, None).pack(), WHAT).rows) == count


def test_pack_takes_few_bytes_a_member() -> None:
    count, rng = 1000, np.random.default_rng(1)
    keys, starts = np.array([b"%08d" % k for k in range(count)]), np.arange(0, 2 * count + 1, 2)
    field, offset = np.tile(np.array([0, 1], np.int32), count), np.arange(2 * count) * 2560 + 512
    row = Rows(keys, starts, field, offset, rng.integers(1, 2000, 2 * count), ("npy", "cls"))
    packed = ShardIndex(row, rng.integers(0, 2**32, 2 * count).astype(np.uint32), -1, None).pack()
    assert struct.unpack_from("<I", packed, 4)[0] <= 16 * 2 * count, "unpacked"
    assert len(packed) <= 10 * 2 * count

    count = 100_000
    size = rng.integers(40, 80, count)
    begins = np.cumsum(size + 1) - size - 1
    lines = Rows(
        np.arange(1, count + 1).astype("S6"), np.arange(count + 1), np.zeros(count, np.int32), begins, size, ("line",)
    )
    assert len(ShardIndex(lines, rng.integers(0, 2**32, count, np.uint32), -1, None).pack()) < 6.1 * count


@pytest.mark.parametrize(
    ("pack", "why"),
    [
        (shard([b"k"], [0, 2], [0, 1], [512, 512], [100, 100]).pack, "members of a shard"),
        (shard([b"k"], [0, 2], [0, 1], [512, 100], [1, 1]).pack, "members of a shard"),
        (shard([b"k"], [0, 2], [0, 1], [2048, 512], [1, 1]).pack, "members of a shard"),
        (lambda: smallest(np.array([3, -1])), "-1 is negative"),
        (lambda: pack_arrays({}, {"x": np.full(125, 2**60)}), "over the limit of 1000: cut the shard"),
        (lambda: write_index(io.BytesIO(), [ONE, replace(ONE, samples=9)], io.BytesIO()), "same address"),
    ],
    ids=["overlap", "no multiple", "out of order", "negative", "long arrays", "same address"],
)
def test_writing_refuses_invalid_values(pack: Callable[[], object], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_arrays, "_BODY_MOST", 1000)
    with pytest.raises((ValueError, LimitError), match=why):
        pack()


@pytest.mark.slow
@pytest.mark.parametrize(("block", "why"), [
    (changed(facts={"size": 3000}), "beyond the archive's end at 3000"),
    (changed(facts={"size": -1}), "would have -1 bytes"),
    (changed(facts={"size": True}), "'size' is 'True'"),
    (changed(facts={"size": 1.5}), "'size' is '1.5'"),
    (changed(facts={"etag": "a\r\nHost: b"}), "version is no text"),
    (changed(facts={"etag": 7}), "'etag' is '7'"),
    (changed(facts={"fields": ["jpg", "jpg"]}), "names of its fields"),
    (changed(facts={"fields": ["jpg", "__url__"]}), "names of its fields"),
    (changed(facts={"fields": ["jpg", 3]}), "names of its fields"),
    (changed(facts={"fields": ["jpg"]}), "'field' has numbers that are too large"),
    (changed(facts={"fields": []}, field=[0, 0, 0], members=[1, 2]), "have no fields"),
    (changed(members=[2, 2]), "have 4 members, and it has 3"),
    (changed(members=[1, 1, 1]), "'members' has 3 entries, not 2"),
    (changed(members=[2**64 - 1, 4]), "too large"),
    (changed(field=[0, 0, 1]), "a field twice"),
    (changed(gap=[1, 1]), "'gap' has 2 entries, not 3"),
    (changed(gap=[1, 1, 2**44]), "beyond the archive's end"),
    (changed(gap=[2**63, 1, 1]), "too large"),
    (changed(facts={"size": None}, gap=[2**44, 2**44, 2**44]), "beyond the archive's end"),
    (changed(size=[2**54, 1, 1]), "too large"),
    (changed(size=[700, 1, 2500]), "beyond the archive's end at 4096"),
    (changed(crc=[1, 2]), "'crc' has 2 entries, not 3"),
    (changed(crc=[1, 2, 2**32]), "'crc' has numbers that are too large"),
    (changed(key_length=[1, 3]), "'key_text' are not 4 bytes long"),
    (changed(key_text=[97, 98, 256]), "'key_text' are not 3 bytes long"),
    (changed(key_text=[97, 98, 0]), "ends with a zero byte"),
    (changed(frame_packed=[], frame_unpacked=[]), "its frames"),
    (changed(frame_packed=[0, 5000], frame_unpacked=[0, 9000]), "its frames"),
    (changed(frame_packed=[0, 50], frame_unpacked=[1, 9000]), "its frames"),
    (changed(frame_packed=[0, 50], frame_unpacked=[0, 2000]), "beyond the archive's end at 2000"),
    (changed(frame_packed=[0, 50]), "no array 'frame_unpacked'"),
    (container({**FACTS, "arrays": {}}), "no array 'size'"),
    (container({**FACTS, "arrays": {"size": ["u1", 2**60]}}), "would end at byte"),
    (container({**FACTS, "arrays": {"size": ["u1", -1]}}), "has the shape"),
    (container({**FACTS, "arrays": {"size": ["O", 1]}}, b"1"), "has the shape"),
    (container({**FACTS, "arrays": {"size": ["u1", True]}}, b"1"), "has the shape"),
    (container({**FACTS, "arrays": {"size": [["u1"], 1]}}, b"1"), "has the shape"),
    (container({**FACTS, "arrays": {"size": "u1"}}, b"1"), "has the shape"),
    (container({**FACTS, "arrays": {}}, b"1"), "arrays end at byte"),
    (container({**FACTS, "arrays": []}), "which arrays it has"),
    (container(FACTS), "which arrays it has"),
    (sealed(b""), "which arrays it has"),
    (sealed(struct.pack("<I", 2**32 - 1) + b"{}"), "which arrays it has"),
    (sealed(struct.pack("<I", 100_000) + b"[" * 100_000), "which arrays it has"),
    (sealed(struct.pack("<I", 5001) + b"1" * 5001), "which arrays it has"),
    (sealed(struct.pack("<I", 2) + b"[]"), "which arrays it has"),
    (sealed_as(1000, bytes(50_000_000)), "unpack to the 1000 bytes"),
    (checked(SMALL.pack()[4:] + b"more"), "does not unpack to"),
])  # fmt: skip
def test_block_of_no_archive_is_refused_with_the_reason(block: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        ShardIndex.unpack(block, WHAT)


def with_one_long_key() -> bytes:
    lengths = np.zeros(500_000, np.int64)
    lengths[0] = 4000
    arrays = dict.fromkeys(("size", "gap", "field", "members"), lengths[:0])
    return pack_arrays(FACTS, {**arrays, "key_length": lengths, "key_text": np.ones(4000, np.int64)})


@pytest.mark.parametrize(("make", "why", "most_bytes"), [
    pytest.param(lambda: sealed(bytes(200_000_000)), "to 200000000", 10_000_000, marks=pytest.mark.slow),
    (with_one_long_key, "500000 keys of up to 4000 bytes", 50_000_000),
])  # fmt: skip
def test_bomb_is_refused_without_taking_memory(make: Callable[[], bytes], why: str, most_bytes: int) -> None:
    bomb = make()

    def refused() -> None:
        with pytest.raises(LimitError, match=why):
            ShardIndex.unpack(bomb, WHAT)

    assert peak_of(refused) < most_bytes


def test_unpack_arrays_reads_what_it_does_not_know_when_it_is_newer() -> None:
    facts, arrays = unpack_arrays(pack_arrays({"new": 1}, {"other": np.array([1, 70000])}), WHAT)
    assert facts == {"new": 1}
    assert arrays["other"].tolist() == [1, 70000]
    assert arrays["other"].dtype == np.dtype("<u4")


# Index files


def test_index_file_returns_each_shard() -> None:
    journal, out = io.BytesIO(), io.BytesIO()
    other = replace(SMALL, etag=None, size=-1)
    for url, one in {"s3://b/x/0.tar": SMALL, "s3://b/x/1.tar": other}.items():
        journal.write(index_of_one(Entry.of(url, one, one.pack()), one.pack()))
    entries, _ = read_journal(journal)
    entries.insert(1, Entry(name="s3://b/x/\udcff.tar", samples=77))
    write_index(out, entries, journal)
    data = out.getvalue()
    directory = read_directory(data[: read_head(data[:24])])
    assert list(directory.names) == ["s3://b/x/0.tar", "s3://b/x/\udcff.tar", "s3://b/x/1.tar"]
    columns = directory.samples, directory.members, directory.nbytes, directory.sizes
    assert [column.tolist() for column in columns] == [[2, 77, 2], [3, 0, 3], [1601, 0, 1601], [SMALL.size, -1, -1]]
    assert [directory.etag(k) for k in range(3)] == ['"e"', None, None]
    start, stop, _ = directory.block(1)
    assert start == stop
    for at, one in {0: SMALL, 2: other}.items():
        start, stop, check = directory.block(at)
        check_block(data[start:stop], check, WHAT)
        assert listed_index(ShardIndex.unpack(data[start:stop], WHAT)) == listed_index(one)
    assert directory.block(2)[1] == len(data)
    assert len(directory) == 3
    assert directory[2] == replace(entries[2], start=directory.block(2)[0])


def test_golden_index_file_of_version_1_is_read() -> None:
    data = base64.b64decode(GOLDEN.read_text())
    directory = read_directory(data)
    assert list(directory.names) == ["https://host/data/train-0.tar", "https://host/data/train-1.tar.zst"]
    assert directory.sizes.tolist() == [5120, 700]
    found = []
    for shard in (0, 1):
        start, stop, check = directory.block(shard)
        check_block(data[start:stop], check, WHAT)
        found.append(listed_index(ShardIndex.unpack(data[start:stop], WHAT)))
    keys, fields, crcs = [b"a/000", b"a/001"], ["jpg", "cls", "jpg", "cls"], [0x01234567, 0x89ABCDEF, 0, 0xFFFFFFFF]
    offset, size, etag = [512, 2048, 3072, 4096], [700, 1, 300, 2], '"0f343b0931126a20f133d67c2b018a3b"'
    assert found[0] == (keys, [0, 2, 4], fields, offset, size, ("jpg", "cls"), crcs, 5120, etag, None)
    frames = [0, 400, 690], [0, 65536, 105_000]
    assert found[1] == ([b"k\xff"], [0, 1], ["npy"], [1024], [100_000], ("npy",), None, 700, None, frames)


TWO_SHARDS = pack_directory([Entry(name="a/0.tar", samples=3), Entry(name="a/1.tar", samples=4)])


@pytest.mark.parametrize(
    ("read", "packed"), [(ShardIndex.unpack, SMALL.pack()), (read_directory, TWO_SHARDS)], ids=["shard", "directory"]
)
@given(data=st.data())
def test_changed_and_missing_bytes_are_an_error(
    read: Callable[[bytes, str], object], packed: bytes, data: st.DataObject
) -> None:
    with pytest.raises(FormatError, match=r"train\.idx") as caught:
        read(damaged(data, packed), WHAT)
    assert "abc" not in str(caught.value)


LEVELS = pack_arrays({"levels": 2, "prefix": ""}, {})


@pytest.mark.parametrize(("read", "data", "why"), [
    (read_head, b"", "is no headrace index file"),
    (read_head, MAGIC, "is no headrace index file"),
    (read_head, b"PK\3\4" + bytes(40), "is no headrace index file"),
    (read_head, HEAD.pack(MAGIC, 2, 0, 10), "version 2, flags 0; .* install a newer headrace"),
    (read_head, HEAD.pack(MAGIC, 1, 1, 10), "version 1, flags 1; .* install a newer headrace"),
    (read_head, HEAD.pack(MAGIC, 1, 0, 2**60), "over the limit"),
    (partial(check_block, b"one"), zlib.crc32(b"other"), r"train\.idx\S+ is damaged: its CRC-32"),
    (read_directory, pack_directory([Entry(name="a", samples=1)])[:30], r"takes \d+ bytes, and there are 30"),
    (read_directory, HEAD.pack(MAGIC, 1, 0, len(LEVELS)) + LEVELS, "2 levels; this headrace reads indexes of 1"),
    (read_directory, pack_directory([Entry(name="a", samples=1, etag="x\r\nHost: b")]), "control characters"),
])  # fmt: skip
def test_other_files_and_versions_are_refused(read: Callable[[Any, str], object], data: Any, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        read(data, WHAT)
    assert "abc" not in str(caught.value)


def test_find_matches_shards_at_other_addresses() -> None:
    names = ["s3://b/x/train/0.tar", "s3://b/x/val/0.tar", "s3://b/x/val/1.tar", "s3://b/y/val/1.tar", "0.tar"]
    directory = read_directory(pack_directory([Entry(name=name, samples=1) for name in names]))
    asked = {
        "s3://b/x/val/0.tar": 1,
        "0.tar": 4,
        "https://host/other/val/0.tar": 1,
        "https://host/train/0.tar?X-Signature=a/b#c/d": 0,
        "/data/y/val/1.tar": 3,
        "/data/val/1.tar": None,  # could be either
        "/data/0.tar": None,
        "train/0.tar": 0,
        "2.tar": None,
        "/data/ain/0.tar": None,  # whole segments only
        "": None,
    }
    assert {url: directory.find(url) for url in asked} == asked
    assert directory.find_all(list(asked)).tolist() == [-1 if at is None else at for at in asked.values()]
    empty = read_directory(pack_directory([]))
    assert (len(empty), empty.find("a/b")) == (0, None)


@given(st.lists(st.text(max_size=8), max_size=8))
def test_directory_lists_all_names(names: list[str]) -> None:
    directory = read_directory(pack_directory([Entry(name=name, samples=0) for name in names]))
    assert list(directory.names) == names
    for at, name in enumerate(names):
        assert directory.find(name) == (at if names.count(name) == 1 else None)


# The journal


def journal_of(*entries: Entry) -> bytes:
    return b"".join(index_of_one(entry, b"block of " + entry.name.encode()) for entry in entries)


ONE, TWO = Entry(name="s3://b/0.tar", samples=3, etag='"x"', size=9), Entry(name="s3://b/1.tar", samples=4)


@given(st.data())
def test_journal_ends_before_a_torn_or_damaged_record(data: st.DataObject) -> None:
    first = len(journal_of(ONE))
    entries, end = read_journal(io.BytesIO(damaged(data, journal_of(ONE, TWO), first)))
    assert ([entry.name for entry in entries], end) == ([ONE.name], first)


@pytest.mark.parametrize("record", [
    b"",
    bytes(24),
    pack_directory([]),
    pack_directory([ONE, TWO]),
    pack_directory([replace(ONE, length=9)]) + b"no block",
    HEAD.pack(MAGIC, 1, 0, 2**32) + bytes(99),
    HEAD.pack(MAGIC, 1, 0, 2**40) + bytes(99),
])  # fmt: skip
def test_journal_ends_when_a_record_is_no_index_of_one_shard(record: bytes) -> None:
    entries, end = read_journal(io.BytesIO(journal_of(ONE) + record))
    assert ([entry.name for entry in entries], end) == ([ONE.name], len(journal_of(ONE)))


def test_write_index_refuses_when_the_journal_has_changed() -> None:
    block = SMALL.pack()
    record = index_of_one(Entry.of("a", SMALL, block), block)
    entries, _ = read_journal(io.BytesIO(record))
    with pytest.raises(FormatError, match="CRC-32"):
        write_index(io.BytesIO(), entries, io.BytesIO(record[:-1] + b"?"))
    with pytest.raises(FormatError, match="journal ends inside the index of a"):
        write_index(io.BytesIO(), entries, io.BytesIO(record[:-1]))


class Own(Format):
    name = "own"
    suffixes = (".own",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    async def index(self, *about: Any) -> ShardIndex:
        return ShardIndex(self.rows, None, 100, None)


def table(offset: list[int], size: list[int], starts: list[int], count: int, block: list[int] | None = None) -> Rows:
    shared = (None, None) if block is None else (np.array(block), np.arange(len(block)))
    keys, field = np.arange(count).astype("S3"), np.zeros(len(offset), np.int32)
    return Rows(keys, np.array(starts), field, np.array(offset, np.int64), np.array(size, np.int64), ("x",), *shared)


def opened(rows: Rows) -> int:
    tables = OwnTables(Own(rows), [ShardEntry("memory://own/0.own")], DEFAULTS)
    index = asyncio.run(tables.open(None, [], lambda ordinal, shard: None))  # type: ignore[arg-type]
    return int(index.counts.sum())


@pytest.mark.parametrize(("rows", "is_possible"), [
    (table([0, 10], [10, 90], [0, 1, 2], 2), True),
    (table([0, 10], [10, 0], [0, 2], 1), True),
    (table([0, 4], [5, 5], [0, 1, 2], 2), True),
    (table([5], [5], [0, 1], 3, [0, 0, 0]), True),
    (table([], [], [0], 0), True),
    (table([10, 0], [5, 5], [0, 1, 2], 2), False),
    (table([0, 4], [9, 4], [0, 1, 2], 2), False),
    (table([-1], [5], [0, 1], 1), False),
    (table([0], [-1], [0, 1], 1), False),
    (table([0], [101], [0, 1], 1), False),
    (table([0], [5], [0, 2], 1), False),
    (table([0], [5], [1, 1], 1), False),
    (table([0, 5], [5, 5], [0, 2, 0, 2], 3), False),
    (table([0], [5], [0, 1], 2), False),
    (table([0], [5], [0, 1], 2, [0, 1]), False),
    (table([0], [5], [0, 1], 2, [0, -1]), False),
    (table([0], [5], [0, 1], 3, [0, 0]), False),
])  # fmt: skip
def test_impossible_table_is_refused_by_name(rows: Rows, is_possible: bool) -> None:
    refused = pytest.raises(FormatError, match=r"'own' .* memory://own/0.own as no shard can be")
    with nullcontext() if is_possible else refused:
        assert opened(rows) == len(rows)


@pytest.mark.asyncio
async def test_read_shared_with_a_user_that_closes_is_repeated() -> None:
    held, calls, has_begun = HeldReads[bytes](len), list[int](), asyncio.Event()

    async def load(number: int) -> bytes:
        calls.append(number)
        has_begun.set()
        await asyncio.sleep(0 if number else 3600)
        return b"read"

    waiting = [asyncio.create_task(held.get("key", partial(load, number))) for number in range(2)]
    await has_begun.wait()
    waiting[0].cancel()
    await held.aclose()
    assert await waiting[1] == b"read"
    assert calls == [0, 1]
    assert waiting[0].cancelled()
