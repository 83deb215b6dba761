"""Parquet: values are those that its own library reads, and damage is an error that names its place."""

from __future__ import annotations

import datetime as dt
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.parquet import of_table, pages_table
from unit.arrow_columns import ARRAYS, plain
from unit.parquet_reads import put, ranges

import headrace as hr
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.arrow_values import getter
from headrace.formats.limits import Limits
from headrace.formats.parquet.decoding import ChunkFile
from headrace.testing import FaultServer


def read(data: bytes, **options: Any) -> list[dict[str, Any]]:
    samples = list(hr.stream(put(data), **options))
    return [{name: value for name, value in one.items() if not name.startswith("__")} for one in samples]


@pytest.mark.parametrize("options", [{}, {"compression": "zstd", "use_dictionary": False, "data_page_version": "2.0"}])
def test_values_are_those_that_pyarrow_reads(options: dict[str, Any]) -> None:
    table = pa.concat_tables([pa.table(ARRAYS)] * 5)
    data = of_table(table, row_group_size=7, **options)
    got, wanted = read(data), table.to_pylist()
    for name in ARRAYS:
        assert [plain(one[name]) for one in got] == [one[name] for one in wanted], name
    assert type(got[0]["list"]) is np.ndarray
    assert got[0]["list"].flags.writeable
    assert type(got[3]["gaps"]) is list
    assert got[0]["gaps"].dtype == np.float64, "the type of a value does not depend on other rows"
    assert type(got[0]["int"]) is int


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
def test_values_of_a_part_of_an_array_are_its_own(name: str) -> None:
    whole = pa.concat_arrays([ARRAYS[name]] * 2)
    part = whole.slice(3, 4)
    assert [plain(getter(part)(k)) for k in range(4)] == part.to_pylist()


def test_times_that_count_nanoseconds_are_those_of_numpy() -> None:
    table = pa.table({"t": pa.array([1, None], pa.timestamp("ns")), "d": pa.array([-1, 5], pa.duration("ns"))})
    first, second = read(of_table(table))
    assert first == {"t": np.datetime64(1, "ns"), "d": np.timedelta64(-1, "ns")}
    assert second["t"] is None


def test_int96_timestamps_that_nanoseconds_cannot_hold_are_read_in_microseconds() -> None:
    far = [dt.datetime(9999, 12, 31), dt.datetime(1, 1, 1), None, dt.datetime(2026, 5, 1, microsecond=3)]  # noqa: DTZ001
    spark = pa.table({"t": pa.array(far, pa.timestamp("us")), "l": pa.array([[one] for one in far])})
    assert read(of_table(spark, use_deprecated_int96_timestamps=True)) == spark.to_pylist()

    fine = np.array([1, -1], "M8[ns]")
    impala = pa.table({"t": fine})
    assert read(of_table(impala, use_deprecated_int96_timestamps=True)) == [{"t": one} for one in fine]

    days = 2_932_896 + 2_440_588  # 9999-12-31 as a Julian day
    both = of_table(impala, use_deprecated_int96_timestamps=True, use_dictionary=False, compression="none")
    first = struct.pack("<qi", 1, 2_440_588)
    assert both.count(first) == 1
    with pytest.raises(hr.DecodeError, match="no unit holds both"):
        read(both.replace(first, struct.pack("<qi", 0, days)))


WITHOUT_PANDAS = """
import sys

class Refuses:
    def find_spec(self, name, *_):
        assert name.partition(".")[0] != "pandas", "it is loaded"

sys.meta_path.insert(0, Refuses())
import headrace as hr
print(len(list(hr.stream(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.process
def test_values_are_read_without_loading_pandas(tmp_path: Path) -> None:
    """It may be installed, and takes half a second to load, in each worker."""
    path = tmp_path / "0.parquet"
    path.write_bytes(of_table(pa.table({**ARRAYS, "ns": pa.array([1, None, 2, 3], pa.timestamp("ns"))})))
    told = [sys.executable, "-c", WITHOUT_PANDAS, str(path)]
    assert subprocess.run(told, capture_output=True, text=True, check=True).stdout == "4\n"


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_every_codec_is_read(codec: str) -> None:
    table = pa.table({"n": range(500), "text": [f"some text {k}" for k in range(500)]})
    assert read(of_table(table, compression=codec, row_group_size=200)) == table.to_pylist()


def test_images_that_datasets_knows_are_their_bytes() -> None:
    features = {
        "image": {"_type": "Image"},
        "more": {"feature": {"_type": "Audio"}, "_type": "List"},
        "grid": {"shape": [2, 2], "dtype": "int32", "_type": "Array2D"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    one = {"bytes": b"\x89PNG", "path": "a.png"}
    table = pa.table(
        {"image": [one, None], "more": [[one], []], "grid": [[[1, 2], [3, 4]]] * 2, "label": [0, 1]}
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    first, second = read(of_table(table))
    assert first["image"] == b"\x89PNG"
    assert first["more"] == [b"\x89PNG"]
    assert first["grid"].shape == (2, 2)
    assert second["image"] is None
    away = table.set_column(0, "image", [[{"bytes": None, "path": "a.png"}] * 2])
    with pytest.raises(hr.DecodeError, match="a path and no bytes"):
        read(of_table(away.replace_schema_metadata(table.schema.metadata)))


def test_columns_are_selected_without_the_index_of_pandas() -> None:
    table = pa.table({"a": [1, 2], "b": ["x", "y"], "c.d": [[1], [2]], "__index_level_0__": [7, 8]})
    assert [set(one) for one in read(of_table(table))] == [{"a", "b", "c.d"}] * 2
    assert [set(one) for one in read(of_table(table), format=hr.Parquet(columns=["c.d", "a"]))] == [{"a", "c.d"}] * 2
    with pytest.raises(FormatError, match=r"no column 'e'; its columns are: __index_level_0__, a, b, c\.d"):
        read(of_table(table), format=hr.Parquet(columns=["e"]))
    for columns in ([], ["__key__"], "a"):
        with pytest.raises(OptionError, match="columns="):
            hr.Parquet(columns=columns)


def test_files_with_other_columns_are_an_error_that_names_both_and_the_column() -> None:
    first, second = (put(of_table(pa.table({"a": [1], "b": column}))) for column in ([1], ["x"]))
    with pytest.raises(FormatError, match=f"column 'b' is text in {second}, and int64 in {first}"):
        list(hr.stream([first, second]))
    assert [one["a"] for one in hr.stream([first, second], format=hr.Parquet(columns=["a"]))] == [1, 1]
    third = put(of_table(pa.table({"a": [1]})))
    with pytest.raises(FormatError, match=f"column 'b' is not there in {third}, and int64 in {first}"):
        list(hr.stream([first, third]))


def test_folders_of_the_address_are_fields() -> None:
    names = ("year=2025/lang=en%20x", "year=2026/lang=__HIVE_DEFAULT_PARTITION__")
    urls = [put(of_table(pa.table({"a": [1, 2]})), f"{name}/0.parquet") for name in names]
    data = hr.stream(urls)
    assert [(one["a"], one["year"], one["lang"]) for one in data] == [
        *((a, "2025", "en x") for a in (1, 2)),
        *((a, "2026", None) for a in (1, 2)),
    ]
    assert [one["year"] for one in data.select("year")] == ["2025"] * 2 + ["2026"] * 2
    assert [set(one) for one in hr.stream(urls[0], format=hr.Parquet(columns=["year"]))] == [
        {"__key__", "__url__", "year"}
    ] * 2


TABLE = pa.table({"n": list(range(40)), "text": [f"text {k}" for k in range(40)], "list": [[k] * 3 for k in range(40)]})
WHOLE = of_table(TABLE, row_group_size=15)


def footer_of(data: bytes) -> tuple[int, bytes]:
    (length,) = struct.unpack("<I", data[-8:-4])
    return len(data) - 8 - length, data[-8 - length : -8]


def with_footer(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    start, footer = footer_of(data)
    footer = change(footer)
    return data[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"


DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "short": (b"PAR1" * 2, "8 bytes"),
    "other head": (b"PARX" + WHOLE[4:], "do not begin as Parquet does"),
    "other end": (WHOLE[:-1] + b"X", "cut off"),
    "cut off": (WHOLE[:-300], "cut off"),
    "long footer": (WHOLE[:-8] + struct.pack("<I", len(WHOLE)) + b"PAR1", "footer would have"),
    "no footer": (WHOLE[:-8] + struct.pack("<I", 0) + b"PAR1", "damaged"),
    "encrypted": (WHOLE[:-4] + b"PARE", "encrypted"),
    "half a footer": (with_footer(WHOLE, lambda footer: footer[: len(footer) // 2]), "does not fit into"),
    "moved": (WHOLE[:4] + WHOLE[104:], "damaged"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_file_is_an_error_that_names_it(what: str) -> None:
    data, why = DAMAGE[what]
    with pytest.raises(FormatError, match=f"memory://parquet/.*{why}"):
        list(hr.stream(put(data), format="parquet"))


def test_unknown_codec_is_an_error_of_the_file() -> None:
    """pyarrow ends the process for such a codec."""
    data = of_table(TABLE.select(["n"]), compression="lz4", use_dictionary=False)
    path = b"\x18\x01n\x15"  # a list of one name, n; then the codec
    damaged = with_footer(data, lambda footer: footer.replace(path + b"\x0e", path + b"\x10"))
    with pytest.raises(FormatError, match="column 'n' of group 0 is compressed by the codec 8, which is not read"):
        list(hr.stream(put(damaged)))


def test_pyarrow_is_given_no_bytes_that_were_not_read() -> None:
    length = int.from_bytes(WHOLE[-8:-4], "little")
    column = pq.ParquetFile(pa.BufferReader(WHOLE)).metadata.row_group(0).column(0)
    start = column.dictionary_page_offset
    chunks = {start: WHOLE[start : start + column.total_compressed_size]}
    file = pq.ParquetFile(ChunkFile(chunks, WHOLE[-8 - length :]), pre_buffer=False)
    assert file.read_row_group(0, ["n"])["n"].to_pylist() == list(range(15))
    with pytest.raises(ValueError, match="which are no column chunk that was read"):
        file.read_row_group(0, ["text"])


@pytest.mark.process
def test_long_file_that_does_not_begin_as_one_is_an_error_of_its_first_rows_without_a_request_more() -> None:
    table = pages_table(2000)
    data = of_table(table, row_group_size=1000, write_page_index=True, data_page_size=4096)
    with FaultServer() as server:
        url, other = server.add("a.parquet", data), server.add("b.parquet", b"PAR?" + data[4:])
        assert [one["n"] for one in hr.stream(url)] == list(range(2000))
        requests = len(server.log)
        with pytest.raises(hr.DecodeError, match=rf"sample '0' of {other}.* begins with b'PAR\?', and not as Parquet"):
            list(hr.stream(other))
        assert len(server.log) <= 2 * requests
        with pytest.raises(hr.DecodeError, match="and not as Parquet does"):
            hr.stream(other)[0]
        assert hr.stream(other)[1999]["n"] == 1999


@pytest.mark.parametrize(("limits", "why"), [
    (Limits(fields=2), "columns would be read, over the limit of 2"),
    (Limits(member_bytes=100), "over the limit of 100"),
    (Limits(unpacked_free_bytes=1000), "over the limit of 1000"),
])  # fmt: skip
def test_file_over_the_limits_is_a_limit_error(limits: Limits, why: str) -> None:
    with pytest.raises(LimitError, match=why):
        list(hr.stream(put(WHOLE), limits=limits))


def test_counts_that_ask_for_memory_are_a_limit_error() -> None:
    data = of_table(TABLE.select(["n"]))
    forty, many = b"\x16\x50", b"\x16" + b"\x80" * 5 + b"\x40"  # 64 bits: 40, 2**40
    for which in (1, 3):
        damaged = with_footer(data, lambda footer, which=which: footer.replace(forty, many, which))
        with pytest.raises(FormatError, match=r"groups have 40|once opened, over the limit"):
            list(hr.stream(put(damaged)))


def test_file_without_rows_and_groups_of_one_row() -> None:
    assert read(of_table(TABLE.slice(0, 0))) == []
    assert [one["n"] for one in read(of_table(TABLE, row_group_size=1))] == list(range(40))


@pytest.mark.process
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "data_page_version": "2.0"}])
def test_row_is_got_by_its_pages(options: dict[str, Any]) -> None:
    table = pages_table(4000)
    data = of_table(table, row_group_size=2500, write_page_index=True, data_page_size=4096, **options)
    with FaultServer() as server:
        stream, wanted = hr.stream(server.add("a.parquet", data)), table.to_pylist()
        assert len(stream) == 4000
        for row in (0, 1, 2499, 2500, 3999, 1234):
            got = stream[row]
            assert {name: plain(got[name]) for name in wanted[row]} == wanted[row]
        server.log.clear()
        assert stream[1300]["n"] == 1300
        nbytes = sum(stop - start for start, stop in ranges(server))
        assert nbytes < len(data) * (0.4 if options else 0.75), "but for the dictionary of a column it is some pages"


def test_row_is_got_all_the_same_where_the_index_of_pages_is_damaged() -> None:
    table = pages_table(1500).select(["text"])
    data = bytearray(of_table(table, write_page_index=True, data_page_size=4096, use_dictionary=False))
    chunk = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(0)
    at = chunk.data_page_offset + chunk.total_compressed_size
    footer, _ = footer_of(bytes(data))
    data[at:footer] = b"\xff" * (footer - at)
    assert hr.stream(put(bytes(data)))[1400]["text"] == table["text"][1400].as_py()


def test_damaged_schema_of_arrow_is_an_error() -> None:
    table = pa.table({"d": pa.array([3], pa.duration("s"))})
    data = of_table(table)
    at = data.index(b"ARROW:schema") + 60
    with pytest.raises(FormatError, match="its schema is damaged"):
        read(data[:at] + b"!!!!" + data[at + 4 :])
