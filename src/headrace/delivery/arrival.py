"""Batches from the engine's delivery messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np

from headrace.delivery.messages import Afters, AfterThese, ChunkDelivery, Delivery, ProgressDelta, RaisedError
from headrace.delivery.slabs import Views
from headrace.errors import LoaderClosedError
from headrace.torch_compat import serialize
from headrace.torch_compat.serialize import each_size, unpack_each
from headrace.torch_compat.spec import Spec
from headrace.workers.failures import PackedError

_SPECS_MOST = 256
_SMALL_BYTES = 65536  # smaller batches are copied, which is cheaper than a lease


class Arrived(NamedTuple):
    """A received batch.

    Attributes:
        open: Returns the batch, or raises the error that replaces it.
        after: Changes of the state after each batch of the message. None if no state is kept.
        number: Index of this batch in `after`.
        late: See `headrace.delivery.messages.Delivery`.
        batch: Number of the batch in the epoch, or of the first batch of its message.
        error: The error that replaces the batch, as packed.
    """

    open: Callable[[], object]
    samples: int
    after: Afters | None
    number: int = 0
    late: ProgressDelta | None = None
    batch: int = 0
    error: PackedError | None = None


class BatchOpener:
    def __init__(self, views: Views) -> None:
        self._views = views
        self._specs: dict[bytes, Spec] = {}

    def arrived(self, message: Delivery | ChunkDelivery) -> Iterable[Arrived]:
        if isinstance(message, Delivery):
            after = None if message.after is None else AfterThese((message.after,))
            return (
                Arrived(
                    partial(self.open, message), message.count, after, 0, message.late, message.batch, message.error
                ),
            )
        batches: Iterator[Callable[[], object]]
        try:  # copy now, so that no batch keeps the whole slab leased
            batches = self._each(message)
        except LoaderClosedError as error:
            batches = itertools.repeat(partial(_raise_again, error))
        assert len(message.after) == len(message.outcomes) == len(message.counts)
        late, arrived = message.late, list[Arrived]()
        for number, (outcome, count) in enumerate(zip(message.outcomes, message.counts, strict=True)):
            raised = outcome if type(outcome) is RaisedError else None
            open_one = next(batches) if raised is None else partial(_raise, raised)
            packed = None if raised is None else raised.error
            arrived.append(Arrived(open_one, count, message.after, number, late, error=packed))
            late = None
        return arrived

    def _each(self, message: ChunkDelivery) -> Iterator[Callable[[], object]]:
        """Copy the batches of a message. Returns functions that open them."""
        places = [outcome for outcome in message.outcomes if not isinstance(outcome, RaisedError)]
        if not places:
            return iter(())
        whole = message.slots
        if whole is None:
            return unpack_each(self._views.copied(message.segment, each_size(places)), places)
        spec = self._spec(whole.blob)
        slab = np.frombuffer(self._views.copied(message.segment, spec.nbytes(whole.capacity)), np.uint8)
        return (
            partial(
                spec.read,
                slab,
                stop - start,
                whole.capacity,
                [column[start:stop] for column in whole.columns],
                copy=True,
                first=start,
            )
            for start, stop in places
        )

    def open(self, delivery: Delivery) -> object:
        if delivery.kind == "error":
            assert delivery.error is not None
            _raise(RaisedError(delivery.error, delivery.note))
        if delivery.kind == "packed":
            nbytes, read = sum(delivery.lengths), partial(serialize.unpack, lengths=delivery.lengths)
        else:
            spec, holes = self._spec(delivery.blob), delivery.holes
            slots = delivery.count + len(holes)
            nbytes = spec.nbytes(slots)
            read = partial(spec.read, count=slots, capacity=delivery.capacity, columns=delivery.columns, holes=holes)
        is_small = nbytes <= _SMALL_BYTES
        if not is_small and not self._views.must_copy:
            return read(self._views.array(delivery.segment), copy=False)
        with self._views.read(delivery.segment, is_small=is_small) as slab:
            return read(slab, copy=True)

    def _spec(self, blob: bytes) -> Spec:
        spec = self._specs.get(blob)
        if spec is None:
            if len(self._specs) >= _SPECS_MOST:
                self._specs.clear()  # each batch has a different spec
            spec = self._specs[blob] = Spec.loads(blob)
        return spec


def _raise(raised: RaisedError) -> NoReturn:
    from headrace.torch_compat.errors import unpack_error

    error = unpack_error(raised.error)
    if raised.note:
        error.add_note(raised.note)
    raise error


def _raise_again(error: Exception) -> NoReturn:
    raise error
