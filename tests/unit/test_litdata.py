"""LitData: values equal what was written, damage and pickles are errors; and its indexes of Parquet files."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import struct
from collections import OrderedDict
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
from headrace.formats.format import ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.litdata.format import LITDATA, LitData, nested_value, tree_of
from headrace.testing.decoders import same

URL = "memory://litdata/index.json"
LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])


def indexed(data: bytes, entry: ShardEntry, limits: Limits = DEFAULTS) -> ShardIndex:
    return asyncio.run(LITDATA.index(OneObject(data), entry, limits))


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
