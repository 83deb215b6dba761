"""The columns of a Parquet file: a tree of elements, written down as a list."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from headrace.formats.arrow_values import Arrow, library
from headrace.formats.parquet.thrift import BINARY, I32, Struct, written
from headrace.pickled import packed_once

_DEPTH_MOST = 64
_REPEATED = 2
_LIST, _MAP = 3, (1, 2)  # as converted types
_TYPES = ("boolean", "int32", "int64", "int96", "float", "double", "binary", "bytes")
INT96, BYTE_ARRAY, FIXED = 3, 6, 7
_CONVERTED = {
    0: "text", 4: "text", 5: "decimal", 6: "date", 7: "time in ms", 8: "time in µs", 9: "timestamp in ms",
    10: "timestamp in µs", 11: "uint8", 12: "uint16", 13: "uint32", 14: "uint64", 15: "int8", 16: "int16",
    19: "json", 20: "bson", 21: "interval",
}  # fmt: skip
_LOGICAL = {
    1: "text", 4: "text", 5: "decimal", 6: "date", 7: "time", 8: "timestamp", 10: "integer", 11: "null", 12: "json",
    13: "bson", 14: "uuid", 15: "float16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchemaLeaf:
    """Where values of a column are: one that has no structs or lists in it has one leaf.

    Attributes:
        path: the names from the column on.
        kind: the number of its physical type.
        nbytes: of each value; those of text and bytes have 4 and more.
    """

    path: tuple[bytes, ...]
    kind: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParquetColumn:
    """A column, which has a field of each sample.

    Attributes:
        elements: its part of the schema as bytes.
        leaves: of it, in order.
        kind: in words; columns of equal words have values of the same kind.
        feature: what `datasets` says of it, as JSON; empty: nothing.
    """

    name: str
    elements: tuple[bytes, ...]
    leaves: tuple[SchemaLeaf, ...]
    kind: str
    feature: str = ""


@packed_once(attrgetter("columns", "arrow", "writer", "constants"))
@dataclass(frozen=True, slots=True)
class Schema:
    """What of a footer is about all groups of rows.

    Attributes:
        columns: those that are read, in order.
        arrow: the same as Arrow's own schema of all columns, in base 64; empty: there is none.
        writer: who has written the file.
        constants: (name, value) of fields that are the same for all rows.
    """

    columns: tuple[ParquetColumn, ...]
    arrow: bytes = b""
    writer: bytes = b""
    constants: tuple[tuple[str, object], ...] = ()

    def head(self, names: Sequence[str]) -> tuple[list[bytes], bytes]:
        """(the list of elements, Arrow's schema) as a footer of just these columns has them."""
        return _head(self, tuple(names))

    @property
    def features(self) -> Mapping[str, object]:
        """What `datasets` says of columns."""
        return _features(self)


@lru_cache(maxsize=64)
def _head(schema: Schema, names: tuple[str, ...]) -> tuple[list[bytes], bytes]:
    columns = [column for column in schema.columns if column.name in names]
    elements = [one for column in columns for one in column.elements]
    root = written([(4, BINARY, b"schema"), (5, I32, len(columns))])
    return [root, *elements], _arrow(schema.arrow, [column.name for column in columns])


def _arrow(schema: bytes, names: Sequence[str]) -> bytes:
    """Arrow's schema of some columns.

    Raises:
        ValueError: it is damaged, or has other columns: kinds would be others than those that were written.
    """
    if not schema:
        return b""
    pa = library()
    try:
        whole: Arrow = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(schema)))
        some = pa.schema([whole.field(name) for name in names])
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"the schema of Arrow in its footer is damaged: {error}") from None
    return base64.b64encode(some.serialize().to_pybytes())


@lru_cache(maxsize=64)
def _features(schema: Schema) -> Mapping[str, object]:
    return {column.name: json.loads(column.feature) for column in schema.columns if column.feature}


def columns_of(elements: Sequence[tuple[bytes, Struct]], said: Mapping[str, object]) -> list[ParquetColumn]:
    """The columns that the elements of a schema describe.

    Args:
        said: what `datasets` says of columns.

    Raises:
        ValueError: they are no tree.
    """
    if not elements:
        raise ValueError("its schema is empty")
    tree = _Tree(elements)
    columns = []
    for _ in range(_number(elements[0][1], 5, "children")):
        start = tree.at
        name, kind, leaves, _ = tree.next(())
        text = json.dumps(said[name]) if name in said else ""
        raw = tuple(one for one, _ in elements[start : tree.at])
        columns.append(
            ParquetColumn(name, raw, tuple(leaves), kind + (f" as {text}" if _is_special(text) else ""), text)
        )
    if tree.at != len(elements):
        raise ValueError(f"its schema has {len(elements)} elements, and {tree.at} of them belong to columns")
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has two columns {twice!r:.200}")
    return columns


def _is_special(feature: str) -> bool:
    """Whether values are of another kind because of what `datasets` says."""
    return any(f'"{name}"' in feature for name in ("Image", "Audio", "Video", "Array2D", "Array3D", "Array4D"))


class _Tree:
    """Goes through elements, of which each column has one, and its parts behind it."""

    def __init__(self, elements: Sequence[tuple[bytes, Struct]]) -> None:
        self._elements, self.at = elements, 1

    def next(self, path: tuple[bytes, ...]) -> _Part:
        """The element that comes now, with its parts."""
        if self.at >= len(self._elements) or len(path) > _DEPTH_MOST:
            raise ValueError("its schema is no tree")
        one = self._elements[self.at][1]
        self.at += 1
        raw = one.get(4)
        if type(raw) is not bytes:
            raise ValueError("a column has no name")
        name, path = raw.decode("utf-8", "replace"), (*path, raw)
        repeated = "list of " if one.get(3) == _REPEATED else ""
        if not one.get(5):
            leaf = _leaf(one, path)
            return _Part(name, repeated + _primitive(one, leaf), [leaf], [])
        parts = [self.next(path) for _ in range(_number(one, 5, "children"))]
        leaves = [leaf for part in parts for leaf in part.leaves]
        converted, logical = one.get(6), one.get(10)
        if converted == _LIST or (type(logical) is dict and 3 in logical):
            inner = parts[0].parts[0] if len(parts[0].parts) == 1 else parts[0]
            return _Part(
                name,
                f"{repeated}list of {inner.kind.removeprefix('list of ' if inner is parts[0] else '')}",
                leaves,
                parts,
            )
        word = "map " if converted in _MAP else ""
        return _Part(
            name, repeated + word + "{" + ", ".join(f"{part.name}: {part.kind}" for part in parts) + "}", leaves, parts
        )


class _Part(NamedTuple):
    """An element with all that lies in it."""

    name: str
    kind: str
    leaves: list[SchemaLeaf]
    parts: list[_Part]


def _leaf(one: Struct, path: tuple[bytes, ...]) -> SchemaLeaf:
    kind = _number(one, 1, "type")
    if not 0 <= kind < len(_TYPES):
        raise ValueError(f"column {_shown(path)} is of type {kind}, which is not known")
    size = _number(one, 2, "length") if kind == FIXED else (1, 4, 8, 12, 4, 8, 4)[kind]
    if size < 0:
        raise ValueError(f"column {_shown(path)} has values of {size} bytes")
    return SchemaLeaf(path, kind, size)


def _primitive(one: Struct, leaf: SchemaLeaf) -> str:
    """A leaf's kind in words."""
    logical, converted = one.get(10), one.get(6)
    word = _TYPES[leaf.kind] + (f" of {leaf.nbytes}" if leaf.kind == FIXED else "")
    if type(converted) is int and converted in _CONVERTED:
        of = f"({one.get(8)!r}, {one.get(7)!r})" if converted == 5 else ""
        return f"{_CONVERTED[converted]}{of} in {word}" if converted else "text"
    if type(logical) is dict and logical:
        number, more = next(iter(logical.items()))
        return f"{_LOGICAL.get(number, number)}{f' {more!r}' if more else ''} in {word}" if number != 1 else "text"
    return word


def _number(one: Struct, field: int, what: str) -> int:
    value = one.get(field, 0)
    if type(value) is not int:
        raise ValueError(f"the {what} of an element of its schema is none")
    return value


def _shown(path: Sequence[bytes]) -> str:
    return repr(".".join(part.decode("utf-8", "replace") for part in path))[:200]
