"""Rows in blocks of many."""

from __future__ import annotations

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError
from headrace.formats.format import Block, Format
from headrace.formats.limits import Limits


def check_blocks(form: Format, rows: Rows, file: bytes, limits: Limits) -> None:
    assert rows.block is not None
    assert rows.about is not None
    assert int((rows.offset + rows.size).max(initial=0)) <= len(file)
    for block, about in enumerate(rows.about):
        members = range(int(rows.starts[block]), int(rows.starts[block + 1]))
        names = tuple(rows.fields[int(rows.field[k])] for k in members)
        bodies = [file[int(rows.offset[k]) : int(rows.offset[k] + rows.size[k])] for k in members]
        try:
            samples = form.open_block(Block("u", names, limits, about), bodies)
            assert len(samples) == int((rows.block == block).sum())
        except (ValueError, FormatError, MemoryError):
            continue
        for row in range(len(samples)):
            try:
                assert samples[row] is None or isinstance(samples[row], dict)
            except ValueError:  # text that is none
                continue
