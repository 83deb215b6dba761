"""Arrow files and streams: values as pyarrow reads them, chosen columns, and damage; rows of its tables."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pytest
from builders.arrows import of_table
from builders.stored import fields, put, ranges, rows
from hypothesis import given
from hypothesis import strategies as st
from unit.arrow_columns import ARRAYS, plain

import headrace as hr
from headrace.errors import FormatError, LimitError
from headrace.formats.arrow import blocks_of
from headrace.formats.arrow_values import TableRows
from headrace.formats.limits import Limits
from headrace.testing import FaultServer

MORE = {
    "dense": pa.UnionArray.from_dense(
        pa.array([0, 1, 0, 1], pa.int8()), pa.array([0, 0, 1, 1], pa.int32()), [pa.array([1, 2]), pa.array(["a", "b"])]
    ),
    "sparse": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0, 1], pa.int8()), [pa.array([1, 2, 3, 4]), pa.array(["a", "b", "c", "d"])]
    ),
    "view": pa.array(["short", "a longer one than a view has itself", None, ""], pa.string_view()),
    "bytes view": pa.array([b"1" * 20, None, b"", b"2" * 40], pa.binary_view()),
    "list view": pa.array([[1], [], None, [2, 3]], pa.list_view(pa.int16())),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 4], pa.int32()), pa.array(["x", "y"])),
    "large list": pa.array([[1], [], None, [2, 3]], pa.large_list(pa.int16())),
    "words": pa.array([["a", "b"], [], None, ["a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
}
WAYS: dict[str, dict[str, Any]] = {
    "file": {},
    "file in zstd": {"compression": "zstd"},
    "file in lz4": {"compression": "lz4"},
    "stream": {"stream": True},
    "stream in zstd": {"stream": True, "compression": "zstd"},
}
TABLE = pa.table({"n": range(100), "text": [f"text {k}" for k in range(100)], "list": [[k] * 3 for k in range(100)]})


def read(data: bytes, name: str = "0.arrow", **options: Any) -> list[dict[str, Any]]:
    return [plain(one) for one in rows(hr.stream(put(data, name), **options))]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_that_pyarrow_reads(way: str) -> None:
    table = pa.concat_tables([pa.table({**ARRAYS, **MORE})] * 5)
    wanted = [plain(one) for one in table.to_pylist()]
    data = hr.stream(put(of_table(table, **WAYS[way]), "0.arrow"))
    got = list(data)
    for name in table.column_names:
        assert [plain(one[name]) for one in got] == [one[name] for one in wanted], name
    assert [one["__key__"] for one in got] == [f"{k}" for k in range(20)]
    assert plain(fields(data[13])) == wanted[13]
    some = sorted(data.select("runs", "view", "int").shuffle("global"), key=lambda one: int(one["__key__"]))
    assert [one["view"] for one in some] == [one["view"] for one in wanted], "each column is found among the others"


def test_older_layout_and_feather_are_read() -> None:
    table = pa.table({name: ARRAYS[name] for name in ("int", "text", "struct")})
    assert read(of_table(table, metadata_version=pa.ipc.MetadataVersion.V4)) == table.to_pylist()
    pyarrow.feather.write_feather(TABLE, out := io.BytesIO(), chunksize=30)
    assert read(out.getvalue(), "0.feather") == TABLE.to_pylist()


def test_files_of_hugging_face_datasets_are_read(tmp_path: Any) -> None:
    features = {"image": {"_type": "Image"}, "grid": {"shape": [2, 2], "dtype": "int32", "_type": "Array2D"}}
    table = pa.table({"image": [{"bytes": b"\x89PNG", "path": "a.png"}] * 9, "grid": [[[1, 2], [3, 4]]] * 9})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path = tmp_path / "data-00000-of-00001.arrow"
    path.write_bytes(of_table(table, stream=True, rows=4))
    data = hr.stream(str(path))
    assert [one["image"] for one in data] == [b"\x89PNG"] * 9
    assert data[8]["grid"].shape == (2, 2)
    assert data.select("image")[3]["image"] == b"\x89PNG"


def test_each_batch_of_a_stream_uses_its_own_dictionary() -> None:
    for emit_deltas in (False, True):
        out, schema = io.BytesIO(), pa.schema({"d": pa.dictionary(pa.int8(), pa.string()), "n": pa.int64()})
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=emit_deltas)
        words = [["a", "b"], ["a", "b", "c"], ["x"]]
        with pa.ipc.new_stream(out, schema, options=options) as writer:
            for known in words:
                values = pa.DictionaryArray.from_arrays(pa.array([0, len(known) - 1], pa.int8()), pa.array(known))
                writer.write_batch(pa.record_batch([values, pa.array([1, 2])], schema=schema))
        data = hr.stream(put(out.getvalue(), "0.arrow"))
        assert [one["d"] for one in data] == ["a", "b", "a", "c", "x", "x"]
        assert data[3]["d"] == "c"


@pytest.mark.process
@pytest.mark.parametrize("way", ["file", "stream"])
def test_columns_are_chosen_and_the_others_not_read(way: str) -> None:
    wide = pa.table({"n": range(500), "body": [bytes([k % 251]) * 2000 for k in range(500)], "__index__": range(500)})
    body = of_table(wide, rows=100, **WAYS[way])
    with FaultServer() as server:
        url = server.add("a.arrow", body)
        assert set(next(iter(hr.stream(url)))) == {"__key__", "__url__", "n", "body"}
        server.log.clear()
        assert [one["n"] for one in hr.stream(url, format=hr.Arrow(columns=["n"]))] == list(range(500))
        assert [one["n"] for one in hr.stream(url).select("n")] == list(range(500))
        nbytes = sum(min(stop, len(body)) - start for start, stop in ranges(server))
        assert nbytes < len(body), "twice: heads, and one column of two"


def test_rows_are_filtered_by_predicates_and_folders_are_columns() -> None:
    urls = [put(of_table(TABLE), f"lang={lang}/0.arrow") for lang in ("en", "de")]
    data = hr.stream(urls, format=hr.Arrow(columns=["n"], where=[("lang", "=", "de"), ("text", "in", ["text 7"])]))
    assert rows(data) == [{"n": 7}]
    assert len(hr.stream(urls, format=hr.Arrow(where=[("lang", "=", "de")]))) == 100
    assert hr.stream(urls)[150]["lang"] == "de"


@pytest.mark.parametrize("way", WAYS)
def test_files_without_rows_and_of_single_rows_are_found_without_a_suffix(way: str) -> None:
    assert read(of_table(TABLE.slice(0, 0), **WAYS[way]), "data") == []
    assert read(of_table(TABLE, rows=1, **WAYS[way]), "data") == TABLE.to_pylist()
    null = pa.table({"a": pa.nulls(5), "b": pa.nulls(5)})
    assert read(of_table(null, **WAYS[way])) == null.to_pylist()


WHOLE = of_table(TABLE, rows=30)
STREAM = of_table(TABLE, rows=30, stream=True)
FOOTER = struct.unpack("<i", WHOLE[-10:-6])[0]


def repeated_batch() -> bytes:
    data = bytearray(WHOLE)
    blocks = [one.start for one in blocks_of(bytes(data[-10 - FOOTER : -10]))[1]]
    at = data.rindex(struct.pack("<q", blocks[1]))
    data[at : at + 24] = data[at - 24 : at]
    return bytes(data)


@pytest.mark.parametrize(("data", "why"), [
    (b"", "0 bytes"),
    (b"nothing of Arrow, for sure", "do not begin as Arrow"),
    (WHOLE[:-30], "cut off"),
    (WHOLE[:-10] + struct.pack("<i", 10**6) + WHOLE[-6:], "footer would have 1000000 bytes"),
    (WHOLE[:-10] + struct.pack("<i", -5) + WHOLE[-6:], "footer would have -5 bytes"),
    (WHOLE[:-10] + struct.pack("<i", 0) + WHOLE[-6:], "damaged"),
    (STREAM[:-200], "cut off"),
    (STREAM[:-4], "cut off in the head"),
    (STREAM[4:], "do not begin as Arrow"),
    (WHOLE[:8] + bytes(16) + WHOLE[8:], "damaged"),
    (repeated_batch(), r"two batches would .* at byte \d+"),
    (b"FEA1" + bytes(60) + b"FEA1", "Feather of version 1.*write_feather"),
])  # fmt: skip
def test_damaged_file_is_an_error_that_names_it(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=f"(?s)memory://stored/.*{why}"):
        read(data, format="arrow")


@pytest.mark.parametrize(("options", "why"), [
    ({"columns": ["x"]}, "no column 'x'; its columns are: n, other, text"),
    ({"where": [("n", "=", "a")]}, "column 'n' with the text 'a', and it is int64"),
    ({"where": [("other", "=", 1)]}, "column 'other' with the number 1, and it is list"),
    ({}, "column 'other' is text in memory://.*, and list of int64 in memory://"),
])  # fmt: skip
def test_columns_that_do_not_fit_are_an_error(options: Any, why: str) -> None:
    table = pa.table({"n": [1], "text": ["a"], "other": [[1]]})
    tables = table, table.set_column(2, "other", pa.array(["x"]))
    urls = [put(of_table(one), "0.arrow") for one in tables]
    with pytest.raises(FormatError, match=why):
        list(hr.stream(urls, format=hr.Arrow(**options)))


def test_rows_before_a_damaged_batch_are_emitted() -> None:
    data = bytearray(of_table(TABLE.select(["text"]), rows=30))
    at = data.rindex(b"text 30text 31")  # before it that fills up the batch before
    data[at : at + 4] = b"\xff\xff\xff\xff"  # no text
    url, got = put(bytes(data), "0.arrow"), list[str]()
    with pytest.raises(hr.DecodeError, match=rf"sample '30' of {url}"):
        got.extend(one["text"] for one in hr.stream(url))
    assert got == [f"text {k}" for k in range(30)]


REPETITIVE = of_table(pa.table({"a": ["x" * 5000] * 30, "b": range(30), "c": range(30)}), rows=30, compression="zstd")
WORDS = of_table(pa.table({"d": pa.array(["x" * 5000, "y" * 5000]).dictionary_encode()}))


@pytest.mark.parametrize(("data", "limits", "why"), [
    (REPETITIVE, Limits(fields=2), "columns would be read, over the limit of 2"),
    (REPETITIVE, Limits(member_bytes=100), "over the limit of 100"),
    (REPETITIVE, Limits(unpacked_free_bytes=1000, unpacked_ratio=1), "over the limit of 1000|or more, the limit is"),
    (WORDS, Limits(member_bytes=9000), "its dictionaries have over 9000 bytes"),
])  # fmt: skip
def test_file_over_the_limits_is_a_limit_error(data: bytes, limits: Limits, why: str) -> None:
    with pytest.raises(LimitError, match=why):
        read(data, limits=limits)


def test_length_that_asks_for_memory_is_a_limit_error() -> None:
    data = of_table(pa.table({"a": pa.nulls(77)}), rows=77)
    length = struct.pack("<q", 77)
    assert data.count(length) >= 2
    with pytest.raises(FormatError, match=r"would take over|77|damaged"):
        read(data.replace(length, struct.pack("<q", 2**40)))


COUNT = 40
TEXTS = st.lists(st.text(max_size=12), min_size=COUNT, max_size=COUNT)


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    """A column of texts, numbers or nested values, also as a dictionary, or that begins within its buffers."""
    texts = draw(st.one_of(TEXTS, st.just([f"word {k}" for k in range(COUNT)])))
    if draw(st.booleans()):
        texts[draw(st.integers(0, COUNT - 1))] = None
    kind = draw(st.sampled_from(["text", "large", "dictionary", "numbers", "flags", "bytes", "dicts", "chats"]))
    values = [None if text is None else {"text": text or None, "n": len(text)} for text in texts]
    column = {
        "text": lambda: pa.array(texts, pa.string()),
        "dictionary": lambda: pa.array(texts, pa.string()),
        "large": lambda: pa.array(texts, pa.large_string()),
        "numbers": lambda: pa.array([None if text is None else len(text) / 2 for text in texts]),
        "flags": lambda: pa.array([None if text is None else "o" in text for text in texts]),
        "bytes": lambda: pa.array([None if text is None else text.encode() for text in texts]),
        "dicts": lambda: pa.array(values),
        "chats": lambda: pa.array([None if value is None else values[k : k + k % 4] for k, value in enumerate(values)]),
    }[kind]()
    first = draw(st.integers(0, 5))
    part = column.slice(first, COUNT - 5)
    return part.dictionary_encode() if kind == "dictionary" else part


@pytest.mark.slow
@given(columns(), columns(), st.data())
def test_values_by_column_equal_values_by_row(first: pa.Array, second: pa.Array, data: st.DataObject) -> None:
    features = data.draw(
        st.sampled_from([{}, {"a": [{"text": None}], "b": {"_type": "Sequence", "feature": {"n": None}}}])
    )
    rows = TableRows(pa.table({"a": first, "b": second}), features, {"folder": "x"})
    start = data.draw(st.integers(0, len(rows) - 1))
    follow = st.builds(lambda count: range(start, min(start + count, len(rows))), st.integers(1, len(rows)))
    numbers = data.draw(st.one_of(follow, st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    found = rows.columns(numbers)
    assert found is not None
    samples = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    assert repr(samples) == repr([rows.row(number) for number in numbers])
