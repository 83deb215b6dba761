"""Parquet damaged at each place of its structure: whole rows, then one error that names the file, or the same rows."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquet import of_table, varint
from unit.parquet_reads import put

import headrace as hr
from headrace.errors import DecodeError, FormatError
from headrace.formats.parquet.footer import ThriftReader

ROWS = [{"n": k, "text": f"text {k}"} for k in range(20)]
WHOLE = of_table(
    pa.Table.from_pylist(ROWS), row_group_size=10, compression="none", write_page_checksum=True, use_dictionary=False
)
FOOTER = len(WHOLE) - 8 - struct.unpack("<I", WHOLE[-8:-4])[0]
CHUNKS = [
    pq.ParquetFile(pa.BufferReader(WHOLE)).metadata.row_group(group).column(column)
    for group in range(2)
    for column in range(2)
]


def read(data: bytes) -> tuple[str, list[dict[str, object]], Exception | None]:
    url, got = put(data), list[dict[str, object]]()
    try:
        got.extend({"n": one["n"], "text": one["text"]} for one in hr.stream(url))
    except (FormatError, DecodeError) as error:
        return url, got, error
    return url, got, None


def places() -> Iterator[int]:
    for chunk in CHUNKS:
        yield from range(chunk.data_page_offset, chunk.data_page_offset + 12, 5)
        yield chunk.data_page_offset + chunk.total_compressed_size - 1
    yield from range(FOOTER, len(WHOLE) - 8, 37)
    yield from range(len(WHOLE) - 8, len(WHOLE))


def test_file_that_is_cut_off_anywhere_is_an_error_that_names_it() -> None:
    for stop in sorted({*places(), 0, 3, 4, 11, 12}):
        url, got, error = read(WHOLE[:stop])
        assert got == []
        assert isinstance(error, FormatError)
        assert url in str(error)


@pytest.mark.slow
def test_changed_byte_is_an_error_after_whole_rows_or_changes_none() -> None:
    """Except for names and types in the schema, which nothing can verify, and the writer's name."""
    for at in sorted({*places(), 0, 1, 3}):
        url, got, error = read(WHOLE[:at] + bytes([WHOLE[at] ^ 0x41]) + WHOLE[at + 1 :])
        if at < FOOTER:
            assert got == ROWS[: len(got)], at
            assert len(got) % 10 == 0, f"{at}: rows of a group come together or not at all"
            assert (error is None) == (len(got) == 20), at
        if error is not None:
            assert url in str(error), at


def test_error_of_a_damaged_page_names_row_and_column() -> None:
    at = CHUNKS[3].data_page_offset + CHUNKS[3].total_compressed_size - 1
    url, got, error = read(WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :])
    assert got == ROWS[:10]
    assert isinstance(error, DecodeError)
    assert f"sample '10' of {url}" in str(error)
    assert "column 'text': the page at byte 0: " in str(error)


def moved(old: int, new: int) -> bytes:
    footer = WHOLE[FOOTER:-8].replace(varint(old), varint(new))
    assert footer != WHOLE[FOOTER:-8]
    ThriftReader(footer).struct()
    return WHOLE[:FOOTER] + footer + struct.pack("<I", len(footer)) + b"PAR1"


FIRST = CHUNKS[0].data_page_offset
OVERLAP = f"is damaged, or not read here: two columns have the bytes at {FIRST + 1}"


@pytest.mark.slow
@pytest.mark.parametrize(("which", "new", "why"), [
    *((which, new, "") for which in (1, 2, 3) for new in (-1, -(2**62), 1, FOOTER, len(WHOLE), 2**62)),
    (1, FIRST + 1, OVERLAP),
])  # fmt: skip
def test_column_at_a_wrong_offset_is_an_error_that_names_it(which: int, new: int, why: str) -> None:
    chunk = CHUNKS[which]
    url, got, error = read(moved(chunk.data_page_offset, new))
    assert got == []
    assert url in str(error)
    assert (why or f"column '{chunk.path_in_schema}' of group {which // 2}") in str(error)


@pytest.mark.slow
def test_chosen_columns_of_ten_thousand_are_read() -> None:
    wide = of_table(pa.table({f"c{k}": [k] for k in range(10_000)}), compression="none", write_statistics=False)
    data = hr.stream(put(wide), format=hr.Parquet(columns=["c9999", "c7"], where=[("c5000", "=", 5000)]))
    assert [(one["c7"], one["c9999"]) for one in data] == [(7, 9999)]
