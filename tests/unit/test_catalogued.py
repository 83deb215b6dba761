"""LitData and MDS: values equal what was written; damage, bombs and pickles are errors with a location."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders import litdata, mds, parquet
from builders.stored import put_folder as put
from builders.stored import rows
from one_object import OneObject

import headrace as hr
from headrace.errors import DecodeError, FormatError, LimitError, ObjectMissingError, OptionError
from headrace.fetch.stores import memory
from headrace.formats.format import Block, Format, ShardEntry
from headrace.formats.index import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.litdata.format import LITDATA, LitData, nested_value, tree_of
from headrace.formats.mds import MDS, columns_of, described, sample_of
from headrace.testing.decoders import same

URL = "memory://litdata/index.json"
LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])


def indexed(data: bytes, entry: ShardEntry, limits: Limits = DEFAULTS, form: Format = LITDATA) -> ShardIndex:
    return asyncio.run(form.index(OneObject(data), entry, limits))


def entry_of(files: dict[str, bytes], limits: Limits = DEFAULTS) -> ShardEntry:
    return LITDATA.catalogued(URL, files["index.json"], limits, dict[str, bytes]().get).entries[0]


def read(files: dict[str, bytes], form: LitData = LITDATA) -> list[dict[str, Any]]:
    return rows(hr.stream(put(files), format=form))


@pytest.mark.parametrize("level", [None, "chunk", "batch", "sample"])
def test_samples_equal_the_written_ones(level: str | None) -> None:
    samples = [
        {
            "int": n - 2**62,
            "list": [n / 3, {"text": "ü" * n, 3: b"\0" * n}],
            "none": None,
            "vector": torch.arange(n, dtype=torch.int32),
            "matrix": torch.ones(n, 3, dtype=torch.float16),
            "array": np.ones((2, n), np.int8),
            "row": np.arange(n, dtype=np.float64),
            "point": torch.tensor(float(n)),
            "bfloat16": torch.tensor([1.5, -n], dtype=torch.bfloat16),
        }
        for n in range(11)
    ]
    found = read(litdata.folder([samples], level))
    assert same(found, samples)
    for sample in found:
        sample["matrix"] += 1  # tensors own their memory
    assert [sample["matrix"].sum() for sample in found] == [6 * n for n in range(11)]


@pytest.mark.parametrize(("item", "sample"), [
    (7, {"value": 7}),
    ((1, "b"), {"0": 1, "1": "b"}),
    ([1.5, (2, [True])], {"0": 1.5, "1": (2, [True])}),
    (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ({3: "x"}, {"3": "x"}),
])  # fmt: skip
def test_items_without_names_get_numbered_fields(item: Any, sample: dict[str, Any]) -> None:
    assert read(litdata.folder([[item]])) == [sample]


def test_images_stay_bytes() -> None:
    jpeg = mds.encoded("jpeg", mds.pictures()[0])
    raw, two = mds.encoded("pil", mds.pictures()[1]), mds.encoded("jpeg_array", [jpeg, jpeg])
    files = litdata.folder([[(jpeg, jpeg, raw, two)]], names=["jpeg", "image:jpg", "pil", "jpeg_array"])
    (sample,) = read(files)
    assert (sample["0"], sample["1"], sample["3"]) == (jpeg, jpeg, [jpeg, jpeg])
    assert np.array_equal(np.asarray(sample["2"]), np.asarray(mds.pictures()[1]))


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("the pickle was run",)


def test_pickle_is_refused_unless_its_field_is_named_or_it_is_none() -> None:
    none, text, trap = pickle.dumps(None), pickle.dumps("text"), pickle.dumps(Trap())
    files = litdata.folder([[{"a": none, "b": text}]], names=["pickle", "pickle"])
    with pytest.raises(DecodeError, match=r"leaf 'b' does not decode as pickle: it is pickled.*unpickle=\('b',\)"):
        read(files)
    assert read(files, LitData(unpickle=("b",))) == [{"a": None, "b": "text"}]
    files = litdata.folder([[{"a": trap, "b": text}]], names=["pickle", "pickle"])
    with pytest.raises(DecodeError, match="leaf 'a'"):
        read(files, LitData(unpickle="b"))


def tagged(tag: int, data: bytes = b"") -> bytes:
    return bytes([tag]) + data


def text_of(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


RECORDS = struct.pack("<II", 2, 2) + text_of("a") + text_of("b") + tagged(17, text_of("x")) + tagged(16)
NESTED: list[tuple[bytes, Any]] = [
    (b'{"a": [1]}', {"a": [1]}),
    (tagged(0, text_of("[null]")), [None]),
    (tagged(1, struct.pack("<I", 2) + text_of("ü") + text_of("")), ["ü", ""]),
    (tagged(2, struct.pack("<Iqq", 2, -1, 2**62)), [-1, 2**62]),
    (tagged(3, struct.pack("<Id", 1, 0.5)), [0.5]),
    (tagged(4, struct.pack("<I", 2) + b"\1\0"), [True, False]),
    (tagged(5, struct.pack("<I", 1) + text_of("k") + tagged(11)), {"k": None}),
    (
        tagged(6, RECORDS + tagged(18, struct.pack("<q", 5)) + tagged(20, b"\1")),
        [{"a": "x", "b": None}, {"a": 5, "b": True}],
    ),
    (tagged(7, text_of("x")), "x"),
    (tagged(8, struct.pack("<q", -7)), -7),
    (tagged(9, struct.pack("<d", 1.5)), 1.5),
    (tagged(10, b"\0"), False),
]


@pytest.mark.parametrize(("data", "value"), NESTED)
def test_nested_leaf_decodes_and_any_part_of_it_is_an_error(data: bytes, value: Any) -> None:
    assert same(nested_value(data), value)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            nested_value(data[:end])
    with pytest.raises(ValueError):
        nested_value(data + b"\0")


@pytest.mark.parametrize("data", [
    tagged(12), tagged(1, b"\xff\xff\xff\xff"), tagged(2, b"\xff\xff\xff\x7f"), tagged(6, b"\xff" * 8),
    tagged(6, struct.pack("<II", 2**32 - 1, 0)), tagged(5, struct.pack("<I", 1) + text_of("k")) * 200,
    tagged(0, text_of("[" * 100_000)), tagged(16), tagged(7, b"\1\0\0\0\xff"),
])  # fmt: skip
def test_nested_leaf_that_claims_too_much_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        nested_value(data)


@pytest.mark.parametrize(("name", "data"), [
    ("int", b"1234567"), ("float", b""), ("bool", b"\2"), ("str", b"\xff"), ("none", b"x"), ("tensor", b"\0" * 7),
    ("tensor", struct.pack(">III", 0, 1, 2**31)), ("tensor", struct.pack(">II", 99, 0)),
    ("tensor", struct.pack(">II", 0, 2**31)), ("tensor", struct.pack(">II3I", 0, 3, 0, 2**32 - 1, 2**32 - 1)[:-1]),
    ("numpy", struct.pack("<III", 14, 1, 0)), ("numpy", struct.pack("<III", 0, 1, 5) + b"1234"),
    ("no_header_tensor:17", b"1234567"), ("no_header_numpy:9", b"123"), ("pil", b"\0" * 11),
    ("jpeg_array", b"\xff" * 4),
])  # fmt: skip
def test_damaged_leaf_is_named_and_sizes_are_checked(name: str, data: bytes) -> None:
    tree = tree_of(json.dumps([name]), LEAF)
    with pytest.raises(ValueError, match="leaf 'value' does not decode"):
        tree.sample(struct.pack("<I", len(data)) + data)
    for sizes in (b"", b"\1\0\0", struct.pack("<I", 9) + b"x", struct.pack("<I", 0) + b"x"):
        with pytest.raises(ValueError, match="sizes"):
            tree.sample(sizes)


WHOLE = litdata.folder([[{"x": n, "s": "a" * n} for n in range(10)]])


def with_index(chunk: dict[str, Any] | None = None, **config: Any) -> bytes:
    index = json.loads(WHOLE["index.json"])
    index["config"].update(config)
    index["chunks"][0].update(chunk or {})
    return json.dumps(index).encode()


def spec(kind: Any, context: Any, *children: Any) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": list(children)}])


BARE = {"type": None, "context": None, "children_spec": []}


@pytest.mark.parametrize("loader", ["TokensLoader", "TemporalArrayLoader"])
def test_catalogue_of_another_loader_is_refused(loader: str) -> None:
    with pytest.raises(OptionError, match=loader):
        LITDATA.catalogued(URL, with_index(item_loader=loader), DEFAULTS, dict[str, bytes]().get)


@pytest.mark.parametrize("level", [None, "batch", "sample"])
def test_changed_table_is_an_error_or_gives_as_many_samples(level: str | None) -> None:
    files = litdata.folder([[{"x": n, "s": "a" * n} for n in range(10)]], level)
    data, entry = files["chunk-0-0.bin"], entry_of(files)
    # a sample may begin elsewhere and then does not decode; a frame may not
    head, unchecked = (24 + 44 + 72, range(14, 24 + 44)) if level == "batch" else (48, range(48))
    for at, value in itertools.product(range(head), (0, 1, 255)):
        changed = data[:at] + bytes([value]) + data[at + 1 :]
        try:
            rows = indexed(changed, entry).rows
        except FormatError:
            continue
        assert changed == data or at in unchecked, f"byte {at} is {value}"
        assert len(rows) == 10
    for end in range(0, len(data), 7):
        with pytest.raises(FormatError, match=r"chunk-0-0.bin is damaged"):
            indexed(data[:end], entry)


def test_frame_with_other_items_is_an_error() -> None:
    items = [litdata.item({"x": n}, ["int"]) for n in range(8)]
    files = litdata.folder([[{"x": n} for n in range(8)]], "batch")
    wrong = litdata.framed([items[0] + items[1], *items[2:8], b""])
    wrong = wrong[:12] + struct.pack("<I", 8) + wrong[16:]
    index = json.loads(files["index.json"])
    index["chunks"][0]["chunk_bytes"] = len(wrong)
    with pytest.raises(DecodeError, match="items of a frame"):
        read({"chunk-0-0.bin": wrong, "index.json": json.dumps(index).encode()})


@pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
def test_bomb_is_a_limit_error(level: str) -> None:
    place = put(litdata.folder([[{"x": b"\0" * 300_000}] * 2], level))
    unpacked = Limits(unpacked_free_bytes=1000, unpacked_ratio=10, member_bytes=10**7)
    for low in (unpacked, Limits(member_bytes=10_000)):
        with pytest.raises(LimitError):
            list(hr.stream(place, limits=low))


def test_catalogues_of_one_name_are_distinguished() -> None:
    one, other = put(WHOLE), put(mds.folder({"x": "int"}, [[{"x": 5}]]))
    assert (len(hr.stream(one)), len(hr.stream(other))) == (10, 1)
    with pytest.raises(FormatError, match=rf"{other}/index\.json"):
        hr.stream([one, other])


def test_table_is_read_at_once_or_in_two_where_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for reads, at_first in ((1, None), (2, 10)):
        if at_first:
            monkeypatch.setattr("headrace.formats.litdata.format._AT_FIRST", at_first)
        source = OneObject(WHOLE["chunk-0-0.bin"])
        index = asyncio.run(LITDATA.index(source, entry_of(WHOLE), DEFAULTS))
        assert (source.reads, index.rows.size.tolist()) == (reads, [16 + n for n in range(10)])


SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})


def file_of(start: int, stop: int) -> bytes:
    return parquet.written([{"n": n, "text": "x" * n} for n in range(start, stop)], SCHEMA, row_group_size=4)


TABLES = {"b.parquet": (10, file_of(0, 10)), "deep/a.parquet": (5, file_of(10, 15)), "c.parquet": (0, file_of(0, 0))}


def index_with(number: int = 0, config: dict[str, Any] | None = None, **chunk: Any) -> dict[str, bytes]:
    files = litdata.of_tables(TABLES, **(config or {}))
    index = json.loads(files["index.json"])
    index["chunks"][number].update(chunk)
    return {**files, "index.json": json.dumps(index).encode()}


def numbers(data: hr.Stream) -> list[int]:
    return [sample["n"] for sample in data]


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "litdata", LitData()])
@pytest.mark.parametrize("end", ["", "/", "/index.json"])
def test_files_are_read_in_the_order_of_the_index(form: Any, end: str) -> None:
    data = hr.stream(put(litdata.of_tables(TABLES)) + end, format=form)
    assert numbers(data) == list(range(15))
    assert (len(data), data[12]["text"]) == (15, "x" * 12)
    assert "parquet, by litdata's index.json" in str(data.describe())


def test_files_that_the_index_does_not_name_are_not_read() -> None:
    place = put(litdata.of_tables({name: TABLES[name] for name in ("deep/a.parquet",)}))
    memory.put(f"{place}/b.parquet", TABLES["b.parquet"][1])
    assert numbers(hr.stream(place)) == list(range(10, 15))


def test_columns_and_where_are_those_of_parquet() -> None:
    place = put(litdata.of_tables(TABLES))
    some = hr.stream(place, format=LitData(parquet=hr.Parquet(columns=["n"], where=[("n", ">", 8)])))
    assert numbers(some) == list(range(9, 15))
    assert "text" not in next(iter(some))


def test_several_folders_are_read_in_turn() -> None:
    first = put(litdata.of_tables({"deep/a.parquet": TABLES["deep/a.parquet"]}))
    other = put(litdata.of_tables({"b.parquet": TABLES["b.parquet"]}))
    assert numbers(hr.stream([first, other])) == [*range(10, 15), *range(10)]
    items = put(litdata.folder([[{"n": 1, "text": "a"}]]))
    with pytest.raises(OptionError, match=f"{items} has shards of litdata, and others of parquet"):
        hr.stream([first, items])
    with pytest.raises(OptionError, match=f"{first} has shards of parquet, and others of litdata"):
        hr.stream([items, first])


@pytest.mark.parametrize(
    ("claim", "why"), [({"chunk_size": 9}, "9"), ({"chunk_size": 11}, "11"), ({"chunk_bytes": 7}, "10 in 7")]
)
def test_file_that_differs_from_the_index_is_an_error(claim: dict[str, int], why: str) -> None:
    place = put(index_with(**claim))
    rows = f"10 rows in {len(TABLES['b.parquet'][1])} bytes"
    for use in (len, list, lambda data: data[14]):
        with pytest.raises(
            FormatError, match=rf"{place}/b\.parquet is damaged.*{rows},.*{place}/index\.json \w+ {why}"
        ):
            use(hr.stream(place))


def test_changed_and_missing_files_are_errors_that_name_them() -> None:
    place = put(litdata.of_tables(TABLES))
    memory.put(f"{place}/b.parquet", file_of(0, 10)[:-1])
    with pytest.raises(FormatError, match=r"b\.parquet is damaged"):
        list(hr.stream(place))
    memory.put(f"{place}/b.parquet", file_of(0, 10))
    memory.remove(f"{place}/deep/a.parquet")
    with pytest.raises(ObjectMissingError, match=r"deep/a\.parquet"):
        list(hr.stream(place))


@pytest.mark.parametrize(("index", "why"), [
    (b"", "no JSON"), (b"[]", "no JSON object"), (b"{}", "no chunks"), (with_index(encryption={"a": 1}), "encrypted"),
    (with_index(data_format=["int", "rot13"]), "'s' is written by the serializer 'rot13'"),
    (with_index(data_format=["int"]), "2 leaves, and its data_format 1"), (with_index(data_spec="[2, {}]"), "known"),
    (with_index(data_spec=None), "describe its items"), (with_index(compression="lz4"), "lz4"),
    (with_index(compression="zstd", compression_level="row"), "'row'"),
    (with_index(data_spec=spec("collections.deque", "null", BARE, BARE)), "deque"),
    (with_index(data_spec=spec("builtins.dict", '["__a", "b"]', BARE, BARE)), "taken"),
    (with_index(data_spec=spec("builtins.dict", '["a", "a"]', BARE, BARE)), "keys"),
    (with_index(data_spec=spec("builtins.dict", '["1", 1]', BARE, BARE)), "one name"),
    (with_index(data_spec=spec("builtins.dict", '["a"]', BARE, BARE)), "keys"),
    (with_index(data_spec=spec(None, None, BARE, BARE)), "None"),
    (with_index({"filename": "../x.bin"}), "outside"), (with_index({"filename": "s3://x"}), "called"),
    (with_index({"chunk_size": -1}), "items"), (with_index({"chunk_bytes": "9"}), "bytes"),
    (index_with(filename="../x.parquet")["index.json"], "chunk 0: .*outside"),
    (index_with(1, filename=None)["index.json"], "chunk 1: .*called"),
    (index_with(1, filename="b.parquet")["index.json"], "entries 0 and 1 both name .*twice"),
    (index_with(2, chunk_size=-1)["index.json"], "chunk 2: it has '-1' items"),
    (index_with(chunk_bytes=True)["index.json"], "chunk 0: .*bytes"),
    (index_with(config={"compression": "zstd"})["index.json"], "compressed or encrypted"),
    (index_with(config={"encryption": {"algorithm": "fernet"}})["index.json"], "compressed or encrypted"),
])  # fmt: skip
def test_damaged_index_is_an_error_with_the_reason(index: bytes, why: str) -> None:
    place = put({"index.json": index})
    with pytest.raises(FormatError, match=rf"{place}/index\.json is damaged: .*{why}"):
        hr.stream(place, format="litdata")


def test_index_of_no_tables_is_an_error() -> None:
    with pytest.raises(OptionError, match="has no shards"):
        hr.stream(put(litdata.of_tables({})))


LOW = Limits(member_bytes=2000, header_bytes=600, pixels=100, unpacked_free_bytes=4000, unpacked_ratio=2)
PICTURES = mds.pictures()
SHARD_URL = "memory://mds/shard.00000.mds"


def mds_indexed(data: bytes, entry: ShardEntry | None = None, limits: Limits = LOW) -> ShardIndex:
    return indexed(data, entry or ShardEntry(SHARD_URL), limits, MDS)


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
    assert same(samples_of(data, mds_indexed(data)), samples)


def test_images_stay_bytes_unless_they_are_raw() -> None:
    columns = {"j": "jpeg", "q": "png", "r": "pil", "l": "list[png]", "a": "jpeg_array", "p": "list[pil]"}
    jpegs = [mds.encoded("jpeg", one) for one in PICTURES]
    sample = {"j": PICTURES[0], "q": PICTURES[0], "r": PICTURES[1], "l": PICTURES, "a": jpegs, "p": PICTURES}
    data = mds.shard(columns, [sample])
    (got,) = samples_of(data, mds_indexed(data, limits=Limits()))
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


SHARD = mds.shard({"x": "int", "s": "str"}, [{"x": n, "s": "a" * n} for n in range(5)])


def test_single_shard_is_indexed_by_one_read() -> None:
    reads = OneObject(SHARD)
    index = asyncio.run(MDS.index(reads, ShardEntry(SHARD_URL), LOW))
    assert (reads.reads, len(index.rows), index.size, index.etag) == (1, 5, len(SHARD), "v1")
    assert index.rows.keys.tolist() == [b"0", b"1", b"2", b"3", b"4"]
    assert samples_of(SHARD, index)[3] == {"x": 3, "s": "aaa"}


def test_long_table_is_read_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.formats.mds._FIRST_BYTES", 10)
    assert samples_of(SHARD, mds_indexed(SHARD))[4]["x"] == 4


def _with_number(data: bytes, at: int, number: int) -> bytes:
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize(("data", "why"), [
    (b"", "cut off"), (SHARD[:3], "cut off"), (SHARD[:20], "cut off"), (SHARD[:-1], "from byte"),
    (SHARD + b"x", "from byte"), (_with_number(SHARD, 0, 2**32 - 1), "over the limit"),
    (_with_number(SHARD, 0, 400), "cut off"), (_with_number(SHARD, 4, 0), "from byte"),
    (_with_number(SHARD, 12, 2**32 - 1), "ends before it begins"), (_with_number(SHARD, 0, 4), "from byte|columns"),
    (b"\x1f\x8b" + bytes(600), "cut off|from byte|limit"),
])  # fmt: skip
def test_table_that_is_damaged_is_an_error_that_names_the_shard(data: bytes, why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=why) as caught:
        mds_indexed(data)
    assert SHARD_URL in str(caught.value)


def test_sample_over_the_limit_is_a_limit_error() -> None:
    with pytest.raises(hr.errors.LimitError, match="sample 0 has 5008 bytes"):
        mds_indexed(mds.shard({"s": "str", "x": "bytes"}, [{"s": "", "x": bytes(5000)}]))


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
    rows = mds_indexed(data, entry, Limits()).rows
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
    block = Block("u", mds_indexed(data, entry, Limits()).rows.fields)
    assert len(MDS.open_block(block, [data])) == 50
    for damaged in (data[:-1], b"", data[:40], data + b"\1"):
        with pytest.raises((ValueError, hr.errors.FormatError)):
            MDS.open_block(block, [damaged])


def test_compressed_shard_of_another_size_or_over_the_limit_is_refused_before_it_is_read() -> None:
    data, entry = compressed("zstd", {"x": "int"})
    with pytest.raises(hr.errors.FormatError, match=r"its catalogue (lists|has)"):
        mds_indexed(data + b"x", entry, Limits())
    with pytest.raises(hr.errors.LimitError, match="bytes unpacked, over the limit of 100"):
        mds_indexed(data, entry, Limits(member_bytes=100))


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
