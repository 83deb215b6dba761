"""Parquet: values are those that its own library reads, damage is an error, and expansion is bounded."""

from __future__ import annotations

import datetime as dt
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquet import of_table, pages_table, varint
from builders.stored import rows
from unit.arrow_columns import ARRAYS, plain
from unit.parquet_reads import blocks_of, indexed, put

import headrace as hr
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.arrow_values import values_of
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import ThriftReader
from headrace.formats.parquet.format import ChunkFile, Parquet, delta_numbers
from headrace.testing import FaultServer


def read(data: bytes, **options: Any) -> list[dict[str, Any]]:
    return rows(hr.stream(put(data), **options))


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
def test_values_of_a_slice_equal_those_of_the_array(name: str) -> None:
    whole = pa.concat_arrays([ARRAYS[name]] * 2)
    part = whole.slice(3, 4)
    assert [plain(values_of(part).get(k)) for k in range(4)] == part.to_pylist()


def test_nanosecond_times_are_numpy_values() -> None:
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


def test_images_of_datasets_are_bytes() -> None:
    features = {
        "image": {"_type": "Image"},
        "more": {"feature": {"_type": "Audio"}, "_type": "List"},
        "grid": {"shape": [2, 2], "dtype": "int32", "_type": "Array2D"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    one = {"bytes": b"\x89PNG", "path": "a.png"}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": [one, None], "more": [[one], []], "grid": [[[1, 2], [3, 4]]] * 2, "label": [0, 1]})
    first, second = read(of_table(table.replace_schema_metadata(about)))
    assert (first["image"], first["more"], second["image"]) == (b"\x89PNG", [b"\x89PNG"], None)
    assert first["grid"].shape == (2, 2)
    away = table.set_column(0, "image", [[{"bytes": None, "path": "a.png"}] * 2])
    with pytest.raises(hr.DecodeError, match="a path and no bytes"):
        read(of_table(away.replace_schema_metadata(about)))


def test_columns_are_selected_without_the_index_of_pandas() -> None:
    data = of_table(pa.table({"a": [1, 2], "b": ["x", "y"], "c.d": [[1], [2]], "__index_level_0__": [7, 8]}))
    assert [set(one) for one in read(data)] == [{"a", "b", "c.d"}] * 2
    assert [set(one) for one in read(data, format=hr.Parquet(columns=["c.d", "a"]))] == [{"a", "c.d"}] * 2
    with pytest.raises(FormatError, match=r"no column 'e'; its columns are: __index_level_0__, a, b, c\.d"):
        read(data, format=hr.Parquet(columns=["e"]))
    for columns in ([], ["__key__"], "a"):
        with pytest.raises(OptionError, match="columns="):
            hr.Parquet(columns=columns)


def test_files_with_other_columns_are_an_error_that_names_both_and_the_column() -> None:
    first, second = (put(pa.table({"a": [1], "b": column})) for column in ([1], ["x"]))
    with pytest.raises(FormatError, match=f"column 'b' is text in {second}, and int64 in {first}"):
        list(hr.stream([first, second]))
    assert [one["a"] for one in hr.stream([first, second], format=hr.Parquet(columns=["a"]))] == [1, 1]
    third = put(pa.table({"a": [1]}))
    with pytest.raises(FormatError, match=f"column 'b' is not there in {third}, and int64 in {first}"):
        list(hr.stream([first, third]))


def test_folders_of_the_address_are_fields() -> None:
    names = ("year=2025/lang=en%20x", "year=2026/lang=__HIVE_DEFAULT_PARTITION__")
    urls = [put(pa.table({"a": [1, 2]}), f"{name}/0.parquet") for name in names]
    data = hr.stream(urls)
    wanted = [{"a": a, "year": year, "lang": lang} for year, lang in (("2025", "en x"), ("2026", None)) for a in (1, 2)]
    assert rows(data) == wanted
    assert [one["year"] for one in data.select("year")] == ["2025"] * 2 + ["2026"] * 2
    assert rows(hr.stream(urls[0], format=hr.Parquet(columns=["year"]))) == [{"year": "2025"}] * 2


TABLE = pa.table({"n": list(range(40)), "text": [f"text {k}" for k in range(40)], "list": [[k] * 3 for k in range(40)]})
WHOLE = of_table(TABLE, row_group_size=15)


def footer_of(data: bytes | bytearray) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def with_footer(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    footer = change(data[footer_of(data) : -8])
    return data[: footer_of(data)] + footer + struct.pack("<I", len(footer)) + b"PAR1"


@pytest.mark.parametrize(("data", "why"), [
    (b"", "0 bytes"),
    (b"PAR1" * 2, "8 bytes"),
    (b"PARX" + WHOLE[4:], "do not begin as Parquet does"),
    (WHOLE[:-1] + b"X", "cut off"),
    (WHOLE[:-300], "cut off"),
    (WHOLE[:-8] + struct.pack("<I", len(WHOLE)) + b"PAR1", "footer would have"),
    (WHOLE[:-8] + struct.pack("<I", 0) + b"PAR1", "damaged"),
    (WHOLE[:-4] + b"PARE", "encrypted"),
    (with_footer(WHOLE, lambda footer: footer[: len(footer) // 2]), "does not fit into"),
    (WHOLE[:4] + WHOLE[104:], "damaged"),
])  # fmt: skip
def test_damaged_file_is_an_error_that_names_it(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=f"memory://stored/.*{why}"):
        list(hr.stream(put(data), format="parquet"))


def test_unknown_codec_is_an_error_of_the_file() -> None:
    """pyarrow ends the process for such a codec."""
    data = of_table(TABLE.select(["n"]), compression="lz4", use_dictionary=False)
    path = b"\x18\x01n\x15"  # a list of one name, n; then the codec
    damaged = with_footer(data, lambda footer: footer.replace(path + b"\x0e", path + b"\x10"))
    with pytest.raises(FormatError, match="column 'n' of group 0 is compressed by the codec 8, which is not read"):
        list(hr.stream(put(damaged)))


def test_pyarrow_reads_only_fetched_bytes() -> None:
    column = pq.ParquetFile(pa.BufferReader(WHOLE)).metadata.row_group(0).column(0)
    start = column.dictionary_page_offset
    chunks = {start: WHOLE[start : start + column.total_compressed_size]}
    file = pq.ParquetFile(ChunkFile(chunks, WHOLE[footer_of(WHOLE) :]), pre_buffer=False)
    assert file.read_row_group(0, ["n"])["n"].to_pylist() == list(range(15))
    with pytest.raises(ValueError, match="which are no column chunk that was read"):
        file.read_row_group(0, ["text"])


@pytest.mark.process
def test_long_file_that_does_not_begin_as_one_is_an_error_of_its_first_rows_without_a_request_more() -> None:
    table = pages_table(2000)
    data = of_table(table, row_group_size=1000)
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


def test_rows_at_any_place_share_the_reading_and_decoding_of_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, open_block = list[str](), Parquet.open_block
    monkeypatch.setattr(Parquet, "open_block", lambda *given: decoded.append(given[1].url) or open_block(*given))
    data = hr.stream(put(pages_table(400), row_group_size=100))
    pairs = data.zip(hr.from_map(range(400))).map(lambda pair: {"n": pair[1]} if pair[0]["n"] == pair[1] else pair)
    for stream in (data.shuffle("global"), data.sample(list(range(399, -1, -1))), pairs):
        with hr.DataLoader(stream, batch_size=None) as loader:
            assert sorted(one["n"] for one in loader) == list(range(400))
            assert loader.stats().fetch.requests <= 12
        assert len(decoded) == 4
        decoded.clear()


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


def test_damaged_schema_of_arrow_is_an_error() -> None:
    table = pa.table({"d": pa.array([3], pa.duration("s"))})
    data = of_table(table)
    at = data.index(b"ARROW:schema") + 60
    with pytest.raises(FormatError, match="its footer is damaged"):
        read(data[:at] + b"!!!!" + data[at + 4 :])


TEXTS = [f"https://example.org/{k // 7}/{k * k}" for k in range(600)]
COLUMNS = {
    "flat": pa.array(TEXTS),
    "gaps": pa.array([None if k % 5 == 0 else text for k, text in enumerate(TEXTS)]),
    "lists": pa.array([[text, None] if k % 3 else None for k, text in enumerate(TEXTS)]),
    "structs": pa.array([{"a": [text]} for text in TEXTS]),
    "bytes": pa.array([text.encode() for text in TEXTS]),
}
LEAF = {"lists": "lists.list.element", "structs": "structs.a.list.element"}


def beginnings(table: pa.Table, **options: Any) -> str:
    encodings = {LEAF.get(name, name): "DELTA_BYTE_ARRAY" for name in table.column_names}
    return put(table, use_dictionary=False, column_encoding=encodings, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "version"), [
    ("none", "1.0"), ("none", "2.0"), ("snappy", "2.0"), ("gzip", "1.0"), ("brotli", "2.0"), ("zstd", "1.0"),
])  # fmt: skip
def test_delta_encoded_values_are_counted_exactly(codec: str, version: str) -> None:
    table = pa.table(COLUMNS)
    low = Limits(unpacked_free_bytes=500_000, unpacked_ratio=1)  # pages and values could take more, and take less
    url = beginnings(table, compression=codec, data_page_version=version)
    got = list(hr.stream(url, limits=low))
    assert [{name: one[name] for name in COLUMNS} for one in got] == table.to_pylist()


def test_delta_encoded_bomb_is_a_limit_error() -> None:
    table = pa.table({"text": ["x" * 100_000 + f"{k:04}" for k in range(1500)]})
    url = beginnings(table, data_page_size=2**30, compression="none")
    with pytest.raises(LimitError, match=r"column 'text': its values take .* bytes or more once they are decoded"):
        list(hr.stream(url))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_repeated_long_values_are_held_once(codec: str) -> None:
    """A dictionary for the first pages, and plain ones after these."""
    texts = ["x" * 60_000] * 1200 + [f"another text {k}" for k in range(1500)]
    body = of_table(pa.table({"text": texts}), dictionary_pagesize_limit=62_000, compression=codec, data_page_size=4096)
    (samples,) = blocks_of(Parquet(), body, indexed(Parquet(), body).rows)
    assert samples.nbytes < 10_000_000, "72 MB, were each held by itself"
    for row in (0, 1199, 1200, 2699):
        assert samples[row]["text"] == texts[row]


@pytest.mark.parametrize("bits", [1, 7, 20, 62])
def test_differences_of_any_width_are_read(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 2**bits, 1000)
    table = pa.table({"n": numbers}, pa.schema([pa.field("n", pa.int64(), nullable=False)]))  # its pages have no levels
    body = of_table(table, use_dictionary=False, column_encoding={"n": "DELTA_BINARY_PACKED"}, compression="none")
    start = pq.ParquetFile(pa.BufferReader(body)).metadata.row_group(0).column(0).data_page_offset
    page = ThriftReader(memoryview(body)[start:])
    page.struct()
    assert delta_numbers(memoryview(body)[start + page.at :], 1000).tolist() == numbers.tolist()


# Damage at each place of the structure: whole rows, then one error that names the file, or the same rows.


ROWS = [{"n": k, "text": f"text {k}"} for k in range(20)]
CHECKED = of_table(
    pa.Table.from_pylist(ROWS), row_group_size=10, compression="none", write_page_checksum=True, use_dictionary=False
)
FOOTER = footer_of(CHECKED)
CHUNKS = [
    pq.ParquetFile(pa.BufferReader(CHECKED)).metadata.row_group(group).column(column)
    for group in range(2)
    for column in range(2)
]


def read_damaged(data: bytes) -> tuple[str, list[dict[str, object]], Exception | None]:
    url, got = put(data), list[dict[str, object]]()
    try:
        got.extend({"n": one["n"], "text": one["text"]} for one in hr.stream(url))
    except (FormatError, hr.DecodeError) as error:
        return url, got, error
    return url, got, None


def places() -> Iterator[int]:
    for chunk in CHUNKS:
        yield from range(chunk.data_page_offset, chunk.data_page_offset + 12, 5)
        yield chunk.data_page_offset + chunk.total_compressed_size - 1
    yield from range(FOOTER, len(CHECKED) - 8, 37)
    yield from range(len(CHECKED) - 8, len(CHECKED))


def flipped(at: int, bits: int) -> bytes:
    return CHECKED[:at] + bytes([CHECKED[at] ^ bits]) + CHECKED[at + 1 :]


def test_file_that_is_cut_off_anywhere_is_an_error_that_names_it() -> None:
    for stop in sorted({*places(), 0, 3, 4, 11, 12}):
        url, got, error = read_damaged(CHECKED[:stop])
        assert got == []
        assert isinstance(error, FormatError)
        assert url in str(error)


@pytest.mark.slow
def test_changed_byte_is_an_error_after_whole_rows_or_changes_none() -> None:
    """Except for names and types in the schema, which nothing can verify, and the writer's name."""
    for at in sorted({*places(), 0, 1, 3}):
        url, got, error = read_damaged(flipped(at, 0x41))
        if at < FOOTER:
            assert got == ROWS[: len(got)], at
            assert len(got) % 10 == 0, f"{at}: rows of a group come together or not at all"
            assert (error is None) == (len(got) == 20), at
        if error is not None:
            assert url in str(error), at


def test_error_of_a_damaged_page_names_row_and_column() -> None:
    url, got, error = read_damaged(flipped(CHUNKS[3].data_page_offset + CHUNKS[3].total_compressed_size - 1, 1))
    assert got == ROWS[:10]
    assert isinstance(error, hr.DecodeError)
    assert f"sample '10' of {url}" in str(error)
    assert "column 'text': the page at byte 0: " in str(error)


FIRST = CHUNKS[0].data_page_offset
OVERLAP = f"is damaged, or not read here: two columns have the bytes at {FIRST + 1}"


@pytest.mark.slow
@pytest.mark.parametrize(("which", "new", "why"), [
    *((which, new, "") for which in (1, 2, 3) for new in (-1, -(2**62), 1, FOOTER, len(CHECKED), 2**62)),
    (1, FIRST + 1, OVERLAP),
])  # fmt: skip
def test_column_at_a_wrong_offset_is_an_error_that_names_it(which: int, new: int, why: str) -> None:
    chunk = CHUNKS[which]
    moved = with_footer(CHECKED, lambda footer: footer.replace(varint(chunk.data_page_offset), varint(new)))
    assert moved != CHECKED
    ThriftReader(moved[FOOTER:-8]).struct()
    url, got, error = read_damaged(moved)
    assert got == []
    assert url in str(error)
    assert (why or f"column '{chunk.path_in_schema}' of group {which // 2}") in str(error)


@pytest.mark.slow
def test_chosen_columns_of_ten_thousand_are_read() -> None:
    wide = of_table(pa.table({f"c{k}": [k] for k in range(10_000)}), compression="none", write_statistics=False)
    data = hr.stream(put(wide), format=hr.Parquet(columns=["c9999", "c7"], where=[("c5000", "=", 5000)]))
    assert [(one["c7"], one["c9999"]) for one in data] == [(7, 9999)]
