"""The table of a changed file, and the samples that it leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from full.fuzz.dice import assert_named
from one_object import OneObject

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError
from headrace.formats.format import Block, Format, ShardEntry
from headrace.formats.limits import Limits


def table_of(
    form: Format, file: bytes | Mapping[str, bytes], entry: ShardEntry, limits: Limits, most_bytes: int = 2**16
) -> Rows | None:
    """The table; None if an error that names the file replaces it."""
    try:
        return asyncio.run(form.index(OneObject(file, most_bytes=most_bytes), entry, limits)).rows
    except FormatError as error:
        assert_named(error, entry.url)
        return None


def samples_of(
    form: Format, rows: Rows, file: bytes, limits: Limits, refusals: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[Any]:
    """The samples of each block, except those that raise one of `refusals`, or ValueError when one is decoded."""
    for block in range(len(rows.starts) - 1):
        members = range(int(rows.starts[block]), int(rows.starts[block + 1]))
        names = tuple(rows.fields[int(rows.field[k])] for k in members)
        bodies = [file[int(rows.offset[k]) : int(rows.offset[k] + rows.size[k])] for k in members]
        about = rows.about[block] if rows.about is not None else None
        try:
            samples = form.open_block(Block("u", names, limits, about), bodies)
        except refusals:
            continue
        assert len(samples) == (1 if rows.block is None else int((rows.block == block).sum()))
        for row in range(len(samples)):
            try:
                sample = samples[row]
            except ValueError:
                continue
            yield sample
