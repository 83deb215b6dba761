"""MDS: every encoding gives what was written; damaged and hostile files are errors with a location."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from builders import mds
from one_object import OneObject

import headrace as hr
from headrace.formats.format import Block, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.mds import MDS, columns_of, described, sample_of
from headrace.testing.decoders import same

LOW = Limits(member_bytes=2000, header_bytes=600, pixels=100, unpacked_free_bytes=4000, unpacked_ratio=2)
PICTURES = mds.pictures()
URL = "memory://mds/shard.00000.mds"


def indexed(data: bytes, entry: ShardEntry | None = None, limits: Limits = LOW) -> ShardIndex:
    return asyncio.run(MDS.index(OneObject(data), entry or ShardEntry(URL), limits))


def samples_of(data: bytes, index: ShardIndex) -> list[Any]:
    rows = index.rows
    block = Block("u", rows.fields, LOW)
    bodies = [data[at : at + size] for at, size in zip(rows.offset.tolist(), rows.size.tolist(), strict=True)]
    if rows.block is not None:
        return list(MDS.open_block(block, bodies))
    return [MDS.open_block(block, [body])[0] for body in bodies]


VALUES: dict[str, list[Any]] = {
    "bytes": [b"", b"\0\xff"],
    "str": ["", "grüße"],
    "int": [0, -(2**63), 2**63 - 1],
    **{name: [np.dtype(name).type(0), np.dtype(name).type(100)] for name in mds.DTYPES},
    "str_int": [0, -(10**40)],
    "str_float": [0.1, float("inf")],
    "str_decimal": [Decimal("1.10"), Decimal("-1e-30")],
    "json": [None, {"a": [1, "ü"]}],
    "ndarray": [np.arange(6, dtype=np.float16).reshape(2, 3), np.ones((300, 1), np.int8)],
    "ndarray:int32": [np.arange(6, dtype=np.int32).reshape(1, 2, 3)],
    "ndarray:uint8:2,3": [np.arange(6, dtype=np.uint8).reshape(2, 3)],
}


@pytest.mark.parametrize("encoding", VALUES)
def test_values_equal_the_written_ones(encoding: str) -> None:
    samples = [{"a": "é" * n, "x": value, "z": n} for n, value in enumerate(VALUES[encoding])]
    data = mds.shard({"a": "str", "x": encoding, "z": "int"}, samples)
    assert same(samples_of(data, indexed(data)), samples)


def test_images_stay_bytes_unless_they_are_raw() -> None:
    columns = {"j": "jpeg", "q": "png", "r": "pil", "l": "list[png]", "a": "jpeg_array", "p": "list[pil]"}
    jpegs = [mds.encoded("jpeg", one) for one in PICTURES]
    sample = {"j": PICTURES[0], "q": PICTURES[0], "r": PICTURES[1], "l": PICTURES, "a": jpegs, "p": PICTURES}
    data = mds.shard(columns, [sample])
    (got,) = samples_of(data, indexed(data, limits=Limits()))
    assert got["j"] == jpegs[0]
    assert got["q"][1:4] == b"PNG"
    assert np.array_equal(np.asarray(got["r"]), np.asarray(PICTURES[1]))
    assert [one[1:4] for one in got["l"]] == [b"PNG"] * 2
    assert got["a"] == jpegs
    assert [np.asarray(one).shape for one in got["p"]] == [(2, 5, 3), (3, 5, 3)]


def test_arrays_own_their_memory() -> None:
    assert sample_of(columns_of(described(["x"], ["ndarray:uint8:3"], [3])), bytes(3))["x"].flags.owndata


@pytest.mark.parametrize(("encoding", "why"), [
    ("pkl", "pickled"), ("float128", "not known"), ("ndarray:object", "not known"), ("ndarray:int8:0", "not known"),
    ("ndarray:int8:1,x", "not known"), ("", "not known"), (None, "not known"), ("list[pkl]", "not known"),
])  # fmt: skip
def test_encoding_that_is_not_read_is_refused_by_the_name_of_its_column(encoding: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"column 'x'.*{why}"):
        described(["x"], [encoding], [None])


@pytest.mark.parametrize(("encoding", "data"), [
    ("int", b"1234567"), ("float64", b""), ("str", b"\xff"), ("json", b"{"), ("str_int", b"x"),
    ("str_int", b"1" * 9999),
    ("ndarray", b""), ("ndarray", b"\x07"), ("ndarray", b"\x08"), ("ndarray", b"\x08\x04\x05abc"),
    ("ndarray:int32", b"\xff"),
    ("ndarray:int8:3", b"ab"), ("pil", b"\0" * 11), ("pil", struct.pack("<III", 2**31, 2**31, 3) + b"RGB"),
    ("pil", struct.pack("<III", 1, 1, 2**31)), ("jpeg_array", b"\xff\xff\xff\xff"), ("list[png]", b"\0" * 7),
    ("list[png]", struct.pack("<III", 0, 1, 5) + b"abc"),
])  # fmt: skip
def test_value_that_is_damaged_names_its_column(encoding: str, data: bytes) -> None:
    columns = columns_of(described(["x"], [encoding], [None]), LOW)
    with pytest.raises(ValueError, match="column 'x' does not decode as"):
        sample_of(columns, struct.pack("<I", len(data)) + data)


@pytest.mark.parametrize("data", [b"", b"\1\0\0", struct.pack("<I", 9) + b"x", struct.pack("<I", 0) + b"x"])
def test_sample_whose_sizes_do_not_fit_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="sizes"):
        sample_of(columns_of(described(["x"], ["str"], [None])), data)


WHOLE = mds.shard({"x": "int", "s": "str"}, [{"x": n, "s": "a" * n} for n in range(5)])


def test_single_shard_is_indexed_by_one_read() -> None:
    reads = OneObject(WHOLE)
    index = asyncio.run(MDS.index(reads, ShardEntry(URL), LOW))
    assert (reads.reads, len(index.rows), index.size, index.etag) == (1, 5, len(WHOLE), "v1")
    assert index.rows.keys.tolist() == [b"0", b"1", b"2", b"3", b"4"]
    assert samples_of(WHOLE, index)[3] == {"x": 3, "s": "aaa"}


def test_long_table_is_read_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.formats.mds._FIRST_BYTES", 10)
    assert samples_of(WHOLE, indexed(WHOLE))[4]["x"] == 4


def _with_number(data: bytes, at: int, number: int) -> bytes:
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize(("data", "why"), [
    (b"", "cut off"), (WHOLE[:3], "cut off"), (WHOLE[:20], "cut off"), (WHOLE[:-1], "from byte"),
    (WHOLE + b"x", "from byte"), (_with_number(WHOLE, 0, 2**32 - 1), "over the limit"),
    (_with_number(WHOLE, 0, 400), "cut off"), (_with_number(WHOLE, 4, 0), "from byte"),
    (_with_number(WHOLE, 12, 2**32 - 1), "ends before it begins"), (_with_number(WHOLE, 0, 4), "from byte|columns"),
    (b"\x1f\x8b" + bytes(600), "cut off|from byte|limit"),
])  # fmt: skip
def test_table_that_is_damaged_is_an_error_that_names_the_shard(data: bytes, why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=why) as caught:
        indexed(data)
    assert URL in str(caught.value)


def test_sample_over_the_limit_is_a_limit_error() -> None:
    with pytest.raises(hr.errors.LimitError, match="sample 0 has 5008 bytes"):
        indexed(mds.shard({"s": "str", "x": "bytes"}, [{"s": "", "x": bytes(5000)}]))


def compressed(compression: str, columns: Mapping[str, str], **hashes: str) -> tuple[bytes, ShardEntry]:
    """A shard of 50 samples, and the catalogue's entry of it with these hashes, if any, in place of its own."""
    samples = [{name: n if name == "x" else "a" * n for name in columns} for n in range(50)]
    files = mds.folder(columns, [samples], compression)
    text = json.loads(files["index.json"])
    for which in ("raw_data", "zip_data") if hashes else ():
        text["shards"][0][which]["hashes"] = hashes
    (entry,) = MDS.catalogued(
        "memory://d/index.json", json.dumps(text).encode(), Limits(), dict[str, bytes]().get
    ).entries
    return files[entry.url.rpartition("/")[2]], entry


@pytest.mark.parametrize("compression", ["zstd:7", "gz", "bz2"])
def test_compressed_shard_is_one_block_of_many_rows(compression: str) -> None:
    data, entry = compressed(compression, {"x": "int", "s": "str"})
    rows = indexed(data, entry, Limits()).rows
    assert rows.block is not None
    assert rows.row is not None
    assert (rows.block.tolist(), rows.row.tolist()) == ([0] * 50, list(range(50)))
    block = Block("u", rows.fields)
    assert list(MDS.open_block(block, [data])) == [{"x": n, "s": "a" * n} for n in range(50)]
    for damaged in (data[:-1], data + b"\0", data[:60] + bytes([data[60] ^ 4]) + data[61:]):
        with pytest.raises((ValueError, hr.errors.FormatError), match="compressed bytes have the sha1"):
            MDS.open_block(block, [damaged])


@pytest.mark.parametrize("compression", ["zstd", "gz"])
def test_compressed_shard_without_hashes_is_checked_by_its_own(compression: str) -> None:
    data, entry = compressed(compression, {"x": "int"}, unheard_of="00")
    block = Block("u", indexed(data, entry, Limits()).rows.fields)
    assert len(MDS.open_block(block, [data])) == 50
    for damaged in (data[:-1], b"", data[:40], data + b"\1"):
        with pytest.raises((ValueError, hr.errors.FormatError)):
            MDS.open_block(block, [damaged])


def test_compressed_shard_of_another_size_or_over_the_limit_is_refused_before_it_is_read() -> None:
    data, entry = compressed("zstd", {"x": "int"})
    with pytest.raises(hr.errors.FormatError, match=r"its catalogue (lists|has)"):
        indexed(data + b"x", entry, Limits())
    with pytest.raises(hr.errors.LimitError, match="bytes unpacked, over the limit of 100"):
        indexed(data, entry, Limits(member_bytes=100))


@pytest.mark.parametrize(("url", "first", "rest"), [
    ("s3://b/d/index.json", "s3://b/d/", ""),
    ("index.json", "", ""),
    ("https://h/d/index.json?sig=1", "https://h/d/", "?sig=1"),
])  # fmt: skip
def test_addresses_of_shards_keep_the_query_of_the_catalogue(url: str, first: str, rest: str) -> None:
    data = mds.folder({"x": "int"}, [[{"x": 1}]] * 2)["index.json"]
    entries = MDS.catalogued(url, data, LOW, dict[str, bytes]().get).entries
    assert [entry.url for entry in entries] == [f"{first}shard.0000{k}.mds{rest}" for k in range(2)]


def changed(**changes: Any) -> bytes:
    text = json.loads(mds.folder({"x": "int"}, [[{"x": 1}]], "gz")["index.json"])
    for path, value in changes.items():
        *before, last = path.split("__")
        place: Any = text["shards"][0] if before or path not in text else text
        for name in before:
            place = place[name]
        place[last] = value
    return json.dumps(text).encode()


@pytest.mark.parametrize(("data", "why"), [
    (b"", "no JSON"), (b"[]", "no JSON object"), (b"[" * 99999, "no JSON"), (changed(version=1), "version"),
    (changed(shards={}), "version"), (changed(shards=[3]), "format"), (changed(format="csv"), "format"),
    (changed(samples=-1), "samples"), (changed(samples=2**40), "samples"), (changed(samples=True), "samples"),
    (changed(samples=1000), "do not fit"), (changed(raw_data=None), "no file"), (changed(zip_data=7), "no file"),
    (changed(zip_data__basename="../../etc/passwd"), "outside"), (changed(zip_data__basename="/etc/passwd"), "called"),
    (changed(zip_data__basename="s3://other/x"), "called"), (changed(zip_data__basename="a?b"), "called"),
    (changed(raw_data__bytes=-1), "bytes"), (changed(raw_data__bytes="9"), "bytes"),
    (changed(raw_data__hashes=[1]), "hashes"),
    (changed(compression="br:11"), "compressed by 'br'"), (changed(compression=None), "compressed by 'None'"),
    (changed(column_names=["x", "y"]), "one length"), (changed(column_names=[3]), "names"),
    (changed(column_sizes=[-8]), "bytes"),
    (changed(column_names=["__x"]), "taken"), (changed(column_encodings=["pkl"]), "pickled"),
    (changed(raw_data__bytes=2**40), "would unpack to"),
])  # fmt: skip
def test_damaged_catalogue_is_an_error_that_names_it(data: bytes, why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=why) as caught:
        MDS.catalogued("memory://d/index.json", data, LOW, dict[str, bytes]().get)
    assert "memory://d/index.json" in str(caught.value)
    assert isinstance(caught.value, hr.errors.LimitError) == (why == "would unpack to")
