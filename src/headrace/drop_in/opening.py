"""Batches as workers have made them, opened for the trainer."""

from __future__ import annotations

import functools

from headrace.deliver.opening import BatchOpener
from headrace.delivery import Delivery
from headrace.drop_in.workers.records import MadeBatch
from headrace.errors import StateMismatchError
from headrace.torch_compat import serialize
from headrace.torch_compat.errors import unpack_error
from headrace.torch_compat.spec import Spec


def bytes_of(made: MadeBatch) -> int:
    """How many bytes it has in shared memory, or on the wire."""
    result = made.result
    if result[0] == "inline":
        return sum(map(len, result[1]))
    if result[0] == "packed":
        return sum(result[2])
    return _spec_of(made.spec).nbytes(result[2]) if result[0] == "slots" else 0


_spec_of = functools.lru_cache(64)(Spec.loads)


def opened(opener: BatchOpener, made: MadeBatch) -> object:
    """The batch that a worker has made, or the exception that it has told instead."""
    result = made.result
    if result[0] == "inline":
        return serialize.unpack_parts(result[1])
    if result[0] == "object":
        return result[1]
    if result[0] == "packed":
        _, segment, lengths = result
        return opener.open(Delivery(made.batch, 0, 0, "packed", segment, lengths=lengths))
    if result[0] == "slots":
        _, segment, count, capacity, columns = result
        where = Delivery(
            made.batch, count, 0, "slots", segment, columns=tuple(columns), capacity=capacity, blob=made.spec
        )
        return opener.open(where)
    assert result[0] != "end"
    error = unpack_error(result[1])
    if isinstance(error, StateMismatchError) and isinstance(error.__cause__, StateMismatchError):
        error.field = error.__cause__.field
    raise error
