"""The columns of a schema of Arrow: which are read, and which of a batch's buffers are theirs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headrace.formats.arrow.messages import MessageHead
from headrace.formats.arrow_values import Arrow, library
from headrace.formats.json_values import as_object

_FIFTH = 4  # version of the layout since which unions say nothing of what is missing
_SPECIAL = ("Image", "Audio", "Video", "Pdf", "Nifti", "Array2D", "Array3D", "Array4D", "Array5D")


@dataclass(frozen=True, slots=True)
class ArrowSchema:
    """The columns of a file.

    Attributes:
        message: the schema as the file has it.
        read: the numbers of those that are read.
        constants: (name, value) of fields that are the same for all rows.
    """

    message: bytes
    read: tuple[int, ...]
    constants: tuple[tuple[str, object], ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the columns that are read."""
        names = schema_of(self.message).names
        return [names[number] for number in self.read]

    @property
    def features(self) -> Mapping[str, object]:
        """What `datasets` says of columns."""
        return features_of(self.message)


@functools.lru_cache(maxsize=64)
def schema_of(message: bytes) -> Arrow:
    """The schema that a message tells.

    Raises:
        ValueError: it is damaged, or has two columns of one name.
    """
    pa = library()
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        names = schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"its schema is damaged: {error}") from None
    if len(set(names)) < len(names):
        raise ValueError(f"it has two columns {next(name for name in names if names.count(name) > 1)!r:.200}")
    return schema


@functools.lru_cache(maxsize=64)
def features_of(message: bytes) -> Mapping[str, object]:
    """What `datasets` says of the columns of a schema."""
    said = (schema_of(message).metadata or {}).get(b"huggingface", b"")
    try:
        info = as_object((as_object(json.loads(said)) or {}).get("info")) if said else None
    except (ValueError, RecursionError):
        return {}
    return as_object((info or {}).get("features")) or {}


def kind_of(field: Arrow, feature: object) -> str:
    """A column's kind in words; columns of equal words have values of the same kind."""
    text = json.dumps(feature)
    special = any(f'"{name}"' in text for name in _SPECIAL)
    return f"{field.type!s:.1000}" + (f" as {text}" if special else "")


class ColumnBuffers(NamedTuple):
    """A column's part of a batch's body.

    Attributes:
        start, stop: where in the body it lies.
        buffers: of it, as the batch's head has them.
    """

    start: int
    stop: int
    buffers: tuple[tuple[int, int], ...]


def buffers_by_column(schema: ArrowSchema, head: MessageHead) -> list[ColumnBuffers]:
    """Where each of all columns lies in the body of a batch.

    Raises:
        ValueError: the batch has other columns than the schema.
    """
    counts = _counts(schema.message, head.version, head.variadic)
    arrays, buffers = (sum(some) for some in zip((0, 0), *counts, strict=True))
    if (arrays, buffers) != (head.nodes, len(head.buffers)):
        raise ValueError(
            f"a batch has {head.nodes} arrays of {len(head.buffers)} buffers, and by the schema {arrays} of {buffers}"
        )
    found, first, end = list[ColumnBuffers](), 0, 0
    for _, count in counts:
        own = head.buffers[first : first + count]
        filled = [one for one in own if one[1]]
        start, end = (filled[0][0], sum(filled[-1])) if filled else (end, end)
        found.append(ColumnBuffers(start, end, own))
        first += count
    return found


@functools.lru_cache(maxsize=256)
def _counts(message: bytes, version: int, variadic: tuple[int, ...]) -> list[tuple[int, int]]:
    """(how many arrays, how many buffers) each column has."""
    more = iter(variadic)
    return [_counted(field.type, version, more) for field in schema_of(message)]


def _counted(kind: Arrow, version: int, variadic: Iterator[int]) -> tuple[int, int]:
    """(how many arrays, how many buffers) a column of a type has."""
    types = library().types
    if hasattr(kind, "storage_type"):
        return _counted(kind.storage_type, version, variadic)
    own = _own_buffers(kind, types, version, lambda: max(0, next(variadic, 0)))
    children = [] if types.is_dictionary(kind) else _children(kind, types)
    below = [_counted(child, version, variadic) for child in children]
    return 1 + sum(arrays for arrays, _ in below), own + sum(buffers for _, buffers in below)


def _own_buffers(kind: Arrow, types: Arrow, version: int, more: Callable[[], int]) -> int:
    """How many buffers an array has beside those of the arrays in it."""
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        return 0
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    if types.is_union(kind):
        return (2 if kind.mode == "dense" else 1) + (version < _FIFTH)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return 2 + more()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return 3
    is_text = types.is_string(kind) or types.is_binary(kind)
    return 3 if is_text or types.is_large_string(kind) or types.is_large_binary(kind) else 2


def _children(kind: Arrow, types: Arrow) -> list[Arrow]:
    if types.is_run_end_encoded(kind):
        return [kind.run_end_type, kind.value_type]
    return [kind.field(k).type for k in range(kind.num_fields)]
