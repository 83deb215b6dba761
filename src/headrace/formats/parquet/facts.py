"""What a worker must know of a group of rows to open it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.formats.parquet.footer import MAGIC, ColumnChunk, by_column
from headrace.formats.parquet.schema import Schema
from headrace.formats.parquet.some_rows import SomeRows
from headrace.formats.predicates import ALL, Where
from headrace.pickled import packed_once
from headrace.types import Ints

Member = tuple[int, int, str]
"""Where a part of the file begins that is read, its bytes, and of which field it is."""


@packed_once(tuple)
class Facts(NamedTuple):
    """What is known of a group of rows.

    Attributes:
        rows: how many it has.
        chunks: of all leaves of the schema's columns, in order.
        where: what must hold for rows that are kept.
        some: the rows that are read of it, with their pages; None: all.
    """

    schema: Schema
    rows: int
    chunks: tuple[ColumnChunk, ...]
    where: Where = ALL
    some: SomeRows | None = None

    @property
    def total(self) -> int:
        """How many rows are read."""
        return self.rows if self.some is None else self.some.total

    @property
    def numbers(self) -> Ints:
        """The numbers in the group of the rows that are read."""
        runs = ((0, self.rows),) if self.some is None else self.some.runs
        return np.concatenate([np.arange(first, stop) for first, stop in runs])

    def number(self, row: int) -> int:
        """That of one of the rows that are read."""
        return row if self.some is None else self.some.number(row)

    @property
    def members(self) -> list[Member]:
        """What is read, in order.

        What lies behind the first bytes of the file is read with these, so that they are looked at without a request.
        """
        if self.some is None:
            places = [
                (min(chunk.start for chunk in own), max(chunk.start + chunk.size for chunk in own), column.name)
                for column, own in by_column(self.schema.columns, self.chunks)
            ]
        else:
            places = [(start, start + size, part.column) for part in self.some.parts for start, size in part.pieces]
        places = [(0 if start == len(MAGIC) else start, stop, name) for start, stop, name in places]
        begin = min((start for start, _, _ in places), default=0)
        places += [(begin, begin, name) for name, _ in self.schema.constants]
        return sorted((start, stop - start, name) for start, stop, name in places)

    def bodies(self, names: Sequence[str], bodies: Sequence[bytes]) -> Mapping[str, Sequence[bytes]]:
        """What was read of each field, in order.

        Raises:
            ValueError: the file does not begin as it should.
        """
        given: dict[str, list[bytes]] = {}
        for name, body in zip(names, bodies, strict=True):
            given.setdefault(name, []).append(body)
        first = next((name for start, size, name in self.members if not start and size), None)
        if first in given:
            head, given[first][0] = given[first][0][: len(MAGIC)], given[first][0][len(MAGIC) :]
            if head != MAGIC:
                raise ValueError(f"the file begins with {head!r}, and not as Parquet does")
        return given
