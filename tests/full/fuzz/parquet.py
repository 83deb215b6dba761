"""Parquet: footers and pages follow the layout, or an error names the file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa
from end_to_end.parquet import of_table
from full.fuzz.blocks import check_blocks
from full.fuzz.dice import Dice, assert_named, edited, starts
from one_object import OneObject

from headrace.errors import FormatError
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.parquet.format import Parquet
from headrace.formats.parquet.thrift import ThriftReader

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


def seeds() -> Iterator[bytes]:
    yield from starts(len(FILES) * len(FORMS), 3)


def check(data: bytes) -> None:
    dice = Dice(data)
    number, which = dice.number(255), dice.number(255) % 3
    file, form = FILES[number % len(FILES)], FORMS[number // len(FILES) % len(FORMS)]
    length = int.from_bytes(file[-8:-4], "little")
    body, footer = file[: -8 - length], file[-8 - length : -8]
    if which == 0:
        file, _ = edited(file, dice, 1 + dice.number(3))
    elif which == 1:  # the footer alone, whose length stays right
        footer, _ = edited(footer, dice, 1 + dice.number(3))
        file = body + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    else:
        with suppress(ValueError):
            ThriftReader(edited(footer, dice, 1 + dice.number(3))[0]).struct()
        body, _ = edited(body, dice, 1)
        file = (body + bytes(len(file)))[: len(file) - 8 - length] + file[-8 - length :]
    try:
        index = asyncio.run(form.index(OneObject(file, most_bytes=max(16, len(file))), ShardEntry(URL), LIMITS))
    except FormatError as error:
        assert_named(error, URL)
        return
    check_blocks(form, index.rows, file, LIMITS)
