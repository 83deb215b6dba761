"""Columns of a group of rows, decoded: pyarrow is given a file of just these, with a footer made for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import LimitError
from headrace.formats.arrow_values import Arrow, library
from headrace.formats.limits import Limits
from headrace.formats.parquet.expansion import check_beginnings, levels_of, longest_value
from headrace.formats.parquet.footer import MAGIC, ColumnChunk
from headrace.formats.parquet.pages import Walked, walked
from headrace.formats.parquet.schema import BYTE_ARRAY, INT96, ParquetColumn, Schema, SchemaLeaf
from headrace.formats.parquet.thrift import BINARY, I32, I64, LIST, STRUCT, Begun, Field, begun, written

_VERSION = 2


class ColumnBytes(NamedTuple):
    """A column with its bytes: for each leaf what is known of them, and the pages."""

    column: ParquetColumn
    leaves: Sequence[tuple[ColumnChunk, bytes]]


def decoded(
    schema: Schema, rows: int, bodies: Sequence[ColumnBytes], limits: Limits, *, is_counted: bool = False
) -> Arrow:
    """The columns as a table of Arrow.

    Args:
        is_counted: whether to see that they have no more rows than that: values do not say it where a row may have
            several, or parts. pyarrow gives as many as there are, of those that it is asked for.

    Raises:
        ValueError: they are damaged; the message names the column, where that is known.
        LimitError: they ask for more than may be held.
    """
    parts, chunks, at, dictionaries = [MAGIC], list[bytes](), len(MAGIC), list[str]()
    unpacked = 0
    for body in bodies:
        levels = levels_of(body.column)
        for leaf, kinds, (chunk, data) in zip(body.column.leaves, levels, body.leaves, strict=True):
            try:
                pages = walked(data, limits)
                if chunk.values not in (-1, pages.values):
                    raise ValueError(f"its pages have {pages.values} values, and the footer says {chunk.values}")
                is_repeated = leaf.kind == BYTE_ARRAY and _is_repeated(pages, chunk, len(data), kinds, limits)
            except LimitError as error:
                raise LimitError(f"column {body.column.name!r:.200}: {error.args[0]}") from None
            except ValueError as error:
                raise ValueError(f"column {body.column.name!r:.200}: {error}") from None
            if is_repeated:  # few values, in many rows: each is held once
                dictionaries.append(".".join(part.decode("utf-8", "replace") for part in leaf.path))
            chunks.append(written([(2, I64, at), (3, STRUCT, _metadata(leaf, chunk, pages, at, len(data)))]))
            parts.append(data)
            at, unpacked = at + len(data), unpacked + pages.unpacked
    elements, arrow = schema.head([body.column.name for body in bodies])
    said = rows + is_counted
    group: list[Field] = [(1, LIST, (STRUCT, chunks)), (2, I64, unpacked), (3, I64, said)]
    facts = [[(1, BINARY, b"ARROW:schema"), (2, BINARY, arrow)]] if arrow else []
    footer = written(
        [
            (1, I32, _VERSION),
            (2, LIST, (STRUCT, elements)),
            (3, I64, said),
            (4, LIST, (STRUCT, [group])),
            (5, LIST, (STRUCT, facts)),
            (6, BINARY, schema.writer),
        ]
    )
    whole = b"".join([*parts, footer, len(footer).to_bytes(4, "little"), MAGIC])
    with_int96 = [body.column.name for body in bodies if any(leaf.kind == INT96 for leaf in body.column.leaves)]
    return _read(whole, rows, dictionaries, with_int96)


def _is_repeated(pages: Walked, chunk: ColumnChunk, nbytes: int, kinds: int, limits: Limits) -> bool:
    """Whether text or bytes are to be held as a dictionary and numbers: where all are so, or would take too much else.

    Raises:
        ValueError, LimitError: see `check_beginnings`.
    """
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * nbytes)
    check_beginnings(pages.beginnings, chunk.codec, kinds, most)
    if pages.is_by_dictionary or pages.dictionary is None:
        return pages.is_by_dictionary
    if pages.dictionary.unpacked * pages.by_dictionary <= most:
        return False
    return longest_value(pages.dictionary, chunk.codec) * pages.by_dictionary > most


def _metadata(leaf: SchemaLeaf, chunk: ColumnChunk, pages: Walked, at: int, nbytes: int) -> bytes:
    fields: list[Field] = [
        (5, I64, pages.values),
        (6, I64, pages.unpacked),
        (7, I64, nbytes),
        (9, I64, at + pages.first),
    ]
    if pages.has_dictionary:
        fields.append((11, I64, at))
    return written(fields, _about(leaf.kind, leaf.path, chunk.codec, pages.has_dictionary))


@functools.lru_cache(maxsize=4096)
def _about(kind: int, path: tuple[bytes, ...], codec: int, has_dictionary: bool) -> Begun:
    """The first fields of the metadata of a leaf's chunks, which are the same in all groups of rows."""
    encodings = [0, 3, 8] if has_dictionary else [0, 3]
    return begun([(1, I32, kind), (2, LIST, (I32, encodings)), (3, LIST, (BINARY, list(path))), (4, I32, codec)])


def _read(whole: bytes, rows: int, dictionaries: Sequence[str], with_int96: Sequence[str]) -> Arrow:
    pa, parquet = _libraries()
    try:
        with parquet.ParquetFile(pa.BufferReader(whole), read_dictionary=list(dictionaries) or None) as file:
            table = file.read(use_threads=False)
        if with_int96:
            with parquet.ParquetFile(pa.BufferReader(whole), coerce_int96_timestamp_unit="us") as file:
                coarse = file.read(list(with_int96), use_threads=False)
            for name in with_int96:
                at = table.column_names.index(name)
                table = table.set_column(at, name, _without_wrap(table.column(name), coarse.column(name)))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from None
    if table.num_rows != rows:
        raise ValueError(f"it has {table.num_rows} rows, and its footer says {rows}")
    return table


def _without_wrap(fine: Arrow, coarse: Arrow) -> Arrow:
    """A column of INT96 timestamps: in nanoseconds if all values fit into int64, else in microseconds.

    pyarrow wraps nanoseconds outside of 1677-2262 without an error. Spark writes such timestamps, with microseconds.

    Args:
        fine: the column in nanoseconds, as pyarrow reads it.
        coarse: the column in microseconds, as pyarrow reads it.

    Raises:
        ValueError: neither unit holds all values exactly.
    """
    pa, _ = _libraries()
    try:
        coarse.cast(fine.type)
    except pa.ArrowInvalid:
        if not coarse.cast(fine.type, safe=False).equals(fine):  # wraps in the same way if no nanoseconds are lost
            raise ValueError(
                "an INT96 column has timestamps outside of 1677-2262, and others with nanoseconds: no unit holds both"
            ) from None
        return coarse
    return fine


@functools.cache
def _libraries() -> tuple[Arrow, Arrow]:
    pa = library()
    import pyarrow.parquet as pq

    return pa, pq
