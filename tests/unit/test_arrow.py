"""Arrow files and streams: values as pyarrow reads them, chosen columns, and damage as an error with the address."""

from __future__ import annotations

import io
import itertools
import json
import struct
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pytest
from end_to_end.arrows import of_table
from unit.arrow_columns import ARRAYS, plain

import headrace as hr
from headrace.errors import FormatError, LimitError
from headrace.fetch.stores import memory
from headrace.formats.arrow.messages import blocks_of
from headrace.formats.limits import Limits
from headrace.testing import FaultServer

NUMBERS = itertools.count()
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


def put(data: bytes, name: str = "0.arrow") -> str:
    url = f"memory://arrow/{next(NUMBERS)}/{name}"
    memory.put(url, data)
    return url


def fields(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in sample.items() if not name.startswith("__")}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_that_pyarrow_reads(way: str) -> None:
    table = pa.concat_tables([pa.table({**ARRAYS, **MORE})] * 5)
    wanted = table.to_pylist()
    data = hr.stream(put(of_table(table, **WAYS[way])))
    got = list(data)
    for name in table.column_names:
        assert [plain(one[name]) for one in got] == [plain(one[name]) for one in wanted], name
    assert [one["__key__"] for one in got] == [f"{k}" for k in range(20)]
    assert fields(data[13]) == {name: plain(value) for name, value in wanted[13].items()}
    some = sorted(data.select("runs", "view", "int").shuffle("global"), key=lambda one: int(one["__key__"]))
    assert [one["view"] for one in some] == [one["view"] for one in wanted], "each column is found among the others"


def test_older_layout_and_feather_are_read() -> None:
    table = pa.table({name: ARRAYS[name] for name in ("int", "text", "struct")})
    data = of_table(table, metadata_version=pa.ipc.MetadataVersion.V4)
    assert [fields(one) for one in hr.stream(put(data))] == table.to_pylist()
    out = io.BytesIO()
    pyarrow.feather.write_feather(TABLE, out, chunksize=30)
    assert [fields(one) for one in hr.stream(put(out.getvalue(), "0.feather"))] == TABLE.to_pylist()


def test_files_of_hugging_face_datasets_are_read(tmp_path: Any) -> None:
    features = {"image": {"_type": "Image"}, "grid": {"shape": [2, 2], "dtype": "int32", "_type": "Array2D"}}
    table = pa.table(
        {"image": [{"bytes": b"\x89PNG", "path": "a.png"}] * 9, "grid": [[[1, 2], [3, 4]]] * 9}
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path = tmp_path / "data-00000-of-00001.arrow"
    path.write_bytes(of_table(table, stream=True, rows=4))
    samples = list(hr.stream(str(path)))
    assert [one["image"] for one in samples] == [b"\x89PNG"] * 9
    assert samples[8]["grid"].shape == (2, 2)
    assert hr.stream(str(path.with_suffix("")) + ".arrow").select("image")[3]["image"] == b"\x89PNG"


def test_dictionaries_that_change_in_a_stream_are_those_of_each_batch() -> None:
    for emit_deltas in (False, True):
        out, schema = io.BytesIO(), pa.schema({"d": pa.dictionary(pa.int8(), pa.string()), "n": pa.int64()})
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=emit_deltas)
        words = [["a", "b"], ["a", "b", "c"], ["x"]]
        with pa.ipc.new_stream(out, schema, options=options) as writer:
            for known in words:
                values = pa.DictionaryArray.from_arrays(pa.array([0, len(known) - 1], pa.int8()), pa.array(known))
                writer.write_batch(pa.record_batch([values, pa.array([1, 2])], schema=schema))
        data = hr.stream(put(out.getvalue()))
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
        ranges = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.log]
        read = sum(min(int(stop) + 1, len(body)) - int(start) for start, stop in ranges)
        assert read < len(body), "twice: heads, and one column of two"


def test_rows_are_filtered_by_predicates_and_folders_are_columns() -> None:
    urls = [put(of_table(TABLE), f"lang={lang}/0.arrow") for lang in ("en", "de")]
    data = hr.stream(urls, format=hr.Arrow(columns=["n"], where=[("lang", "=", "de"), ("text", "in", ["text 7"])]))
    assert [fields(one) for one in data] == [{"n": 7}]
    assert len(hr.stream(urls, format=hr.Arrow(where=[("lang", "=", "de")]))) == 100
    assert hr.stream(urls)[150]["lang"] == "de"


@pytest.mark.parametrize("way", WAYS)
def test_files_without_rows_and_of_single_rows_are_found_without_a_suffix(way: str) -> None:
    assert list(hr.stream(put(of_table(TABLE.slice(0, 0), **WAYS[way]), "data"))) == []
    assert [one["n"] for one in hr.stream(put(of_table(TABLE, rows=1, **WAYS[way]), "data"))] == list(range(100))
    null = pa.table({"a": pa.nulls(5), "b": pa.nulls(5)})
    assert [fields(one) for one in hr.stream(put(of_table(null, **WAYS[way])))] == null.to_pylist()


WHOLE = of_table(TABLE, rows=30)
STREAM = of_table(TABLE, rows=30, stream=True)
FOOTER = struct.unpack("<i", WHOLE[-10:-6])[0]


def repeated_batch() -> bytes:
    data = bytearray(WHOLE)
    blocks = [one.start for one in blocks_of(bytes(data[-10 - FOOTER : -10]))[1]]
    at = data.rindex(struct.pack("<q", blocks[1]))
    data[at : at + 24] = data[at - 24 : at]
    return bytes(data)


DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "nonsense": (b"nothing of Arrow, for sure", "do not begin as Arrow"),
    "cut off": (WHOLE[:-30], "cut off"),
    "long footer": (WHOLE[:-10] + struct.pack("<i", 10**6) + WHOLE[-6:], "footer would have 1000000 bytes"),
    "less than no footer": (WHOLE[:-10] + struct.pack("<i", -5) + WHOLE[-6:], "footer would have -5 bytes"),
    "no footer": (WHOLE[:-10] + struct.pack("<i", 0) + WHOLE[-6:], "damaged"),
    "stream that is cut off": (STREAM[:-200], "cut off"),
    "stream cut in a head": (STREAM[: len(STREAM) - 4], "cut off in the head"),
    "old stream": (STREAM[4:], "do not begin as Arrow"),
    "moved": (WHOLE[:8] + bytes(16) + WHOLE[8:], "damaged"),
    "two batches at one byte": (repeated_batch(), r"two batches would .* at byte \d+"),
    "first version of Feather": (b"FEA1" + bytes(60) + b"FEA1", "Feather of version 1.*write_feather"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_file_is_an_error_that_names_it(what: str) -> None:
    data, why = DAMAGE[what]
    with pytest.raises(FormatError, match=f"(?s)memory://arrow/.*{why}"):
        list(hr.stream(put(data), format="arrow"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"columns": ["x"]}, "no column 'x'; its columns are: n, other, text"),
        ({"where": [("n", "=", "a")]}, "column 'n' with the text 'a', and it is int64"),
        ({"where": [("other", "=", 1)]}, "column 'other' with the number 1, and it is list"),
        ({}, "column 'other' is text in memory://.*, and list of int64 in memory://"),
    ],
)
def test_columns_that_do_not_fit_are_an_error(options: Any, why: str) -> None:
    table = pa.table({"n": [1], "text": ["a"], "other": [[1]]})
    urls = put(of_table(table)), put(of_table(table.set_column(2, "other", pa.array(["x"]))))
    with pytest.raises(FormatError, match=why):
        list(hr.stream(urls, format=hr.Arrow(**options)))


def test_rows_before_a_damaged_batch_are_given() -> None:
    data = bytearray(of_table(TABLE.select(["text"]), rows=30))
    at = data.rindex(b"text 30text 31")  # before it that fills up the batch before
    data[at : at + 4] = b"\xff\xff\xff\xff"  # no text
    url, got = put(bytes(data)), list[str]()
    with pytest.raises(hr.DecodeError, match=rf"sample '30' of {url}"):
        got.extend(one["text"] for one in hr.stream(url))
    assert got == [f"text {k}" for k in range(30)]


@pytest.mark.slow
@pytest.mark.parametrize("data", [WHOLE, STREAM], ids=["file", "stream"])
def test_every_head_may_be_damaged(data: bytes) -> None:
    """Whatever a byte of a head becomes: the same rows, or other values, or one error of ours."""
    ends = [k for k in range(0, len(data) - 8, 8) if data[k : k + 4] == b"\xff\xff\xff\xff"]
    places = [k for end in ends for k in range(end, min(end + 160, len(data)), 23)]
    places += range(len(data) - FOOTER - 10, len(data), 19) if data is WHOLE else []
    for at in places:
        url = put(data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :])
        try:
            list(hr.stream(url, format="arrow"))
        except (FormatError, hr.DecodeError) as error:
            if url not in str(error):
                raise


REPETITIVE = pa.table({"a": ["x" * 5000] * 30, "b": range(30), "c": range(30)})
WORDS = pa.table({"d": pa.array(["x" * 5000, "y" * 5000]).dictionary_encode()})


@pytest.mark.parametrize(
    ("table", "limits", "why"),
    [
        (REPETITIVE, Limits(fields=2), "columns would be read, over the limit of 2"),
        (REPETITIVE, Limits(member_bytes=100), "over the limit of 100"),
        (
            REPETITIVE,
            Limits(unpacked_free_bytes=1000, unpacked_ratio=1),
            "over the limit of 1000|or more, the limit is",
        ),
        (WORDS, Limits(member_bytes=9000), "its dictionaries have over 9000 bytes"),
    ],
)
def test_file_over_the_limits_is_a_limit_error(table: pa.Table, limits: Limits, why: str) -> None:
    compression = "zstd" if table is REPETITIVE else None
    with pytest.raises(LimitError, match=why):
        list(hr.stream(put(of_table(table, rows=30, compression=compression)), limits=limits))


def test_length_that_asks_for_memory_is_a_limit_error() -> None:
    data = of_table(pa.table({"a": pa.nulls(77)}), rows=77)
    length = struct.pack("<q", 77)
    assert data.count(length) >= 2
    with pytest.raises(FormatError, match=r"would take over|77|damaged"):
        list(hr.stream(put(data.replace(length, struct.pack("<q", 2**40)))))
