"""Columns of a batch: locates their buffers, and decodes the fetched bytes with pyarrow."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.errors import LimitError
from headrace.formats.arrow.messages import MessageHead, head_of
from headrace.formats.arrow_values import Arrow, features_of, library
from headrace.formats.limits import Limits

_UNPACKED = -1  # length of an uncompressed buffer in a compressed batch
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ArrowSchema:
    """The schema message of a file, numbers of the columns to read, and constant fields."""

    message: bytes
    read: tuple[int, ...]
    constants: tuple[tuple[str, object], ...] = ()

    @property
    def names(self) -> list[str]:
        names = schema_of(self.message).names
        return [names[number] for number in self.read]

    @property
    def features(self) -> Mapping[str, object]:
        return features_of((schema_of(self.message).metadata or {}).get(b"huggingface", b""))


class ColumnBuffers(NamedTuple):
    """A column's part [start, stop) of a batch's body, and its buffers from the batch's head."""

    start: int
    stop: int
    buffers: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=64)
def schema_of(message: bytes) -> Arrow:
    """Parse the schema in a message. Raises a ValueError if damaged, or for duplicate names."""
    pa = library()
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        names = schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"its schema is damaged: {error}") from None
    if len(set(names)) < len(names):
        raise ValueError(f"it has two columns {next(name for name in names if names.count(name) > 1)!r:.200}")
    return schema


def buffers_by_column(schema: ArrowSchema, head: MessageHead) -> list[ColumnBuffers]:
    """Return the buffers of each column of a batch. A mismatch with the schema is a ValueError."""
    counts = _counts(schema.message, head.variadic)
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
def _counts(message: bytes, variadic: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (number of arrays, of buffers) of each column. `variadic` adds buffers of views."""
    pa, more, found = library(), iter(variadic), []
    for field in schema_of(message):
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type)], ["x"])
        head = head_of(empty.serialize().to_pybytes())
        found.append((head.nodes, len(head.buffers) + sum(max(0, next(more, 0)) for _ in head.variadic)))
    return found


def decoded(
    schema: ArrowSchema, head: bytes, dictionaries: Sequence[bytes], bodies: Mapping[int, bytes], limits: Limits
) -> Arrow:
    """Decode some columns of a batch.

    pyarrow gets a stream of this batch alone, with zeros in place of other columns.

    Args:
        head: The bytes of the batch before its body.
        bodies: The bytes of each column, by its number.
    """
    pa, said = library(), head_of(head)
    places = buffers_by_column(schema, said)
    if said.is_packed:
        _check_unpacked({number: places[number] for number in bodies}, bodies, limits)
    before = b"".join([schema.message, *dictionaries, head])
    whole = np.zeros(len(before) + said.body, np.uint8)  # pages that are not written take no memory
    whole[: len(before)] = np.frombuffer(before, np.uint8)
    for number, body in bodies.items():
        at = len(before) + places[number].start
        whole[at : at + len(body)] = np.frombuffer(body, np.uint8)
    options = pa.ipc.IpcReadOptions(included_fields=sorted(bodies), use_threads=False)
    try:
        with pa.ipc.open_stream(pa.py_buffer(whole), options=options) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ValueError(str(error)) from None
    names = [schema_of(schema.message).names[number] for number in sorted(bodies)]
    if batch.num_rows != said.rows or batch.schema.names != names:
        raise ValueError(f"it has {batch.num_rows} rows of {batch.schema.names!r:.200}, and its head has {said.rows}")
    return batch


def _check_unpacked(places: Mapping[int, ColumnBuffers], bodies: Mapping[int, bytes], limits: Limits) -> None:
    unpacked, packed = 0, sum(map(len, bodies.values()))
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * packed)
    for number, place in places.items():
        for start, size in place.buffers:
            if not size:
                continue
            if size < _LENGTH_BYTES:
                raise ValueError(f"a compressed buffer has {size} bytes")
            at = start - place.start
            length = int.from_bytes(bodies[number][at : at + _LENGTH_BYTES], "little", signed=True)
            unpacked += size if length == _UNPACKED else length
            if length < _UNPACKED or unpacked > most:
                raise LimitError(f"its columns unpack to {unpacked} bytes or more, the limit is {most}")
