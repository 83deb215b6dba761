"""Decodes the columns of a row group with pyarrow."""

from __future__ import annotations

import io
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace._util.pickled import packed_once
from headrace.errors import LimitError
from headrace.formats.arrow_values import Arrow, library
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import CODECS, MAGIC, FileFacts, ParquetLeaf
from headrace.formats.parquet.page_headers import FILLER_BYTES, check_pages, filler
from headrace.formats.parquet.page_index import ColumnPages, Run
from headrace.formats.predicates import ALL, Where
from headrace.types import Buffer, Ints

Member = tuple[int, int, str]
"""(offset in the file, number of bytes, field)."""

_FILLER_MOST = 2**30
_TAIL_BYTES = 64 * 1024
_TAIL_AT = 2**62  # beyond the columns of any file


@packed_once(tuple)
class GroupFacts(NamedTuple):
    """Metadata that a worker needs to decode a row group.

    Attributes:
        raw: The group's footer entry, with the columns that are read.
        runs: The rows that are read.
        where: The remaining predicate.
    """

    file: FileFacts
    number: int
    raw: bytes
    runs: tuple[Run, ...]
    columns: tuple[ColumnPages, ...]
    where: Where = ALL

    @property
    def total(self) -> int:
        return sum(stop - first for first, stop in self.runs)

    @property
    def numbers(self) -> Ints:
        """Numbers in the group of the rows that are read."""
        return np.concatenate([np.arange(first, stop) for first, stop in self.runs])

    @property
    def members(self) -> list[Member]:
        """The byte ranges to read, in order.

        The first bytes of the file are read with the column that follows them, so that checking them needs no request.
        """
        pieces = [(start, start + size, part.column) for part in self.columns for start, size in part.pieces]
        places = [(0 if start == len(MAGIC) else start, stop, name) for start, stop, name in pieces]
        begin = min((start for start, _, _ in places), default=0)
        places += [(begin, begin, name) for name, _ in self.file.constants]
        return sorted((start, stop - start, name) for start, stop, name in places)

    def bodies(self, names: Sequence[str], bodies: Sequence[bytes]) -> Mapping[str, Sequence[bytes]]:
        """Return the pieces of each column, in file order. Checks the magic (ValueError)."""
        given: dict[str, list[bytes]] = {}
        for name, body in zip(names, bodies, strict=True):
            given.setdefault(name, []).append(body)
        first = next((name for start, size, name in self.members if not start and size), None)
        if first in given:
            head, given[first][0] = given[first][0][: len(MAGIC)], given[first][0][len(MAGIC) :]
            if head != MAGIC:
                raise ValueError(f"the file begins with {head!r}, and not as Parquet does")
        return given


def decoded(
    facts: GroupFacts, parts: Sequence[ColumnPages], bodies: Mapping[str, Sequence[bytes]], limits: Limits
) -> dict[str, Arrow]:
    """Decode the rows `facts.runs` of some columns. `bodies` are their pieces, in file order."""
    if not parts:
        return {}
    chunks, dictionaries, together = dict[int, Buffer](), list[str](), dict[tuple[Run, ...], list[ColumnPages]]()
    for part in parts:
        own = dict(zip(part.pieces, bodies[part.column], strict=True))
        if [size for _, size in own] != list(map(len, own.values())):
            raise ValueError(f"column {part.column!r:.200} has other bytes than its pages have")
        for one in part.leaves:
            data = b"".join(own[piece] for piece in one.pieces)
            try:
                pages = check_pages(data, one.leaf, CODECS[one.codec], limits)
                if one.values not in (-1, pages.values):
                    raise ValueError(f"its pages have {pages.values} values, and the footer has {one.values}")
                chunks[one.start] = _padded(data, one.size)
            except LimitError as error:
                raise LimitError(f"column {part.column!r:.200}: {error.args[0]}") from None
            except ValueError as error:
                raise ValueError(f"column {part.column!r:.200}: {error}") from None
            if pages.as_dictionary:
                dictionaries.append(one.leaf.path)
        together.setdefault(part.runs, []).append(part)
    columns: dict[str, Arrow] = {}
    footer = facts.file.footer(facts.raw)
    file = _opened(ChunkFile(chunks, footer), read_dictionary=dictionaries)
    for runs, some in together.items():
        leaves = [one.leaf for part in some for one in part.leaves]
        table = _read(file, leaves, runs)
        if any(leaf.physical == "INT96" for leaf in leaves):
            coarse = _read(_opened(ChunkFile(chunks, footer), coerce_int96_timestamp_unit="us"), leaves, runs)
            for at, part in enumerate(some):
                if any(one.leaf.physical == "INT96" for one in part.leaves):
                    column = _without_wrap(table.column(at), coarse.column(at))
                    table = table.set_column(at, part.column, column)
        chosen = _of_runs(table, runs, facts.runs)
        columns.update(zip(chosen.column_names, chosen.columns, strict=True))
    return columns


class ChunkFile(io.RawIOBase):
    """A file of some column chunks, by offset, and a footer. All other reads raise a ValueError."""

    def __init__(self, chunks: Mapping[int, Buffer], footer: bytes) -> None:
        self._chunks, self._at = chunks, 0
        self._tail = bytes(_TAIL_BYTES) + footer  # pyarrow reads so many bytes to find the footer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, _TAIL_AT + len(self._tail))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> Buffer:
        at, self._at = self._at, self._at + size
        if at >= _TAIL_AT:
            return self._tail[at - _TAIL_AT :][:size]
        chunk = self._chunks.get(at, b"")
        if len(chunk) != size:
            raise ValueError(f"pyarrow asks for {size} bytes at {at}, which are no column chunk that was read")
        return chunk


def _padded(data: bytes, size: int) -> Buffer:
    """Return pages as a chunk of `size` bytes. Readers skip the zeros that replace other pages."""
    missing = size - len(data)
    if not missing:
        return data
    if missing < FILLER_BYTES:
        raise ValueError(f"its pages omit {missing} bytes, which is less than a page has")
    whole, at = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), len(data)  # zeros, not yet backed by memory
    whole[:at] = data
    while at < size:
        nbytes = size - at if size - at <= _FILLER_MOST else _FILLER_MOST - FILLER_BYTES
        head = filler(nbytes)
        whole[at : at + len(head)] = head
        at += nbytes
    return memoryview(whole)


def _opened(file: ChunkFile, **options: object) -> Arrow:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file, pre_buffer=False, **options)
    except (library().ArrowException, OSError) as error:
        raise ValueError(f"its footer is damaged: {error}") from None


def _read(file: Arrow, leaves: Sequence[ParquetLeaf], runs: Sequence[Run]) -> Arrow:
    pa, rows = library(), sum(stop - first for first, stop in runs)
    try:
        table = file.reader.read_row_group(0, column_indices=[leaf.position for leaf in leaves], use_threads=False)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from None
    if any(len(column) != rows for column in table.columns):
        raise ValueError(
            f"its columns have {[len(column) for column in table.columns][:9]} rows, and should have {rows}"
        )
    return table


def _of_runs(table: Arrow, have: Sequence[Run], wanted: Sequence[Run]) -> Arrow:
    if have == wanted:
        return table
    parts, at, k = [], 0, 0
    for first, stop in wanted:
        while have[k][1] < stop:
            at += have[k][1] - have[k][0]
            k += 1
        parts.append(table.slice(at + first - have[k][0], stop - first))
    return parts[0] if len(parts) == 1 else library().concat_tables(parts)


def _without_wrap(fine: Arrow, coarse: Arrow) -> Arrow:
    """Return INT96 timestamps in nanoseconds if all fit into int64, else in microseconds.

    pyarrow silently wraps nanoseconds outside of 1677-2262. Spark writes such timestamps, with microseconds.
    """
    pa = library()
    try:
        coarse.cast(fine.type)
    except pa.ArrowInvalid:
        if not coarse.cast(fine.type, safe=False).equals(fine):  # wraps in the same way if no nanoseconds are lost
            raise ValueError(
                "an INT96 column has timestamps outside of 1677-2262, and others with nanoseconds: no unit holds both"
            ) from None
        return coarse
    return fine
