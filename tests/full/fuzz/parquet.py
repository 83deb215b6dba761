"""Parquet: footers and pages follow the layout, or an error names the file."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pyarrow as pa
from builders.parquet import of_table
from full.fuzz.dice import Dice, edited, starts
from full.fuzz.samples import samples_of, table_of

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError
from headrace.formats.format import Format, ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import ThriftReader
from headrace.formats.parquet.format import Parquet

LIMITS = Limits(member_bytes=20_000, fields=40, unpacked_free_bytes=200_000, unpacked_ratio=20)
URL = "memory://fuzz/0.parquet"
TABLE = pa.table(
    {
        "n": [1, None, 3, 4, 5],
        "text": ["a", "ü", None, "", "text"],
        "list": [[1.0], [], None, [2.0, 3.0], [4.0]],
        "struct": [{"a": 1, "b": [b"x"]}, None, {"a": None, "b": None}, {"a": 2, "b": []}, {"a": 3, "b": [b"y"]}],
    }
)
FORMS = [Parquet(), Parquet(where=[[("n", ">", 2), ("n", "!=", 4)], [("n", "in", [3])]])]
FILES = [
    of_table(TABLE, row_group_size=2, compression="none", write_page_index=True),
    of_table(TABLE, row_group_size=3, compression="zstd", use_dictionary=False, data_page_version="2.0"),
    of_table(TABLE.select(["n"]), compression="snappy", write_page_checksum=True),
    of_table(TABLE, compression="none", write_page_index=True, data_page_size=20, write_batch_size=2),
    of_table(
        pa.table({"text": [f"https://example.org/{k}" for k in range(400)]}),
        use_dictionary=False,
        column_encoding={"text": "DELTA_BYTE_ARRAY"},
        compression="none",
    ),
]
seeds = partial(starts, len(FILES) * len(FORMS), 3)


def check(data: bytes) -> None:
    dice = Dice(data)
    number, which = dice.number(255), dice.number(255) % 3
    file, form = FILES[number % len(FILES)], FORMS[number // len(FILES) % len(FORMS)]
    length = int.from_bytes(file[-8:-4], "little")
    body, footer = file[: -8 - length], file[-8 - length : -8]
    if which == 0:
        file = edited(file, dice, 1 + dice.number(3))
    elif which == 1:  # the footer alone, whose length stays right
        footer = edited(footer, dice, 1 + dice.number(3))
        file = body + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    else:
        with suppress(ValueError):
            ThriftReader(edited(footer, dice, 1 + dice.number(3))).struct()
        body = edited(body, dice, 1)
        file = (body + bytes(len(file)))[: len(file) - 8 - length] + file[-8 - length :]
    rows = table_of(form, file, ShardEntry(URL), LIMITS, max(16, len(file)))
    if rows is not None:
        check_rows(form, rows, file)


def check_rows(form: Format, rows: Rows, file: bytes) -> None:
    assert rows.block is not None
    assert rows.about is not None
    assert int((rows.offset + rows.size).max(initial=0)) <= len(file)
    samples = samples_of(form, rows, file, LIMITS, (ValueError, FormatError, MemoryError))
    assert all(sample is None or isinstance(sample, dict) for sample in samples)
