"""Some columns of a batch, decoded: pyarrow is given a stream of just this batch, with nothing where others lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.errors import LimitError
from headrace.formats.arrow.columns import ArrowSchema, ColumnBuffers, buffers_by_column, schema_of
from headrace.formats.arrow.messages import head_of
from headrace.formats.arrow_values import Arrow, library
from headrace.formats.limits import Limits

_UNPACKED = -1  # as the length of a buffer that is not compressed, in a batch that is
_LENGTH_BYTES = 8


def decoded(
    schema: ArrowSchema, head: bytes, dictionaries: Sequence[bytes], bodies: Mapping[int, bytes], limits: Limits
) -> Arrow:
    """The columns as a batch of Arrow.

    Args:
        bodies: of each column by its number the bytes.

    Raises:
        ValueError: they are damaged.
        LimitError: they ask for more than may be held.
    """
    pa, said = library(), head_of(head)
    places = buffers_by_column(schema, said)
    if said.codec is not None:
        _check_unpacked({number: places[number] for number in bodies}, bodies, limits)
    before = b"".join([schema.message, *dictionaries, head])
    whole = np.zeros(len(before) + said.body, np.uint8)  # what is not written takes no memory
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
        raise ValueError(f"it has {batch.num_rows} rows of {batch.schema.names!r:.200}, and its head says {said.rows}")
    return batch


def _check_unpacked(places: Mapping[int, ColumnBuffers], bodies: Mapping[int, bytes], limits: Limits) -> None:
    """See that buffers do not unpack to more than they may.

    Raises:
        ValueError, LimitError: they do.
    """
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
