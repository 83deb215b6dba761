"""A batch in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum

from headrace._util.shared_memory import Lease
from headrace.delivery.messages import Delivery
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import Part


class BatchState(Enum):
    """open → filling → collating → ready → delivered."""

    OPEN = "open"
    FILLING = "filling"
    COLLATING = "collating"
    READY = "ready"
    DELIVERED = "delivered"


class OpenBatch:
    """One batch, from its first sample to its delivery; or several whole ones, made by one task."""

    def __init__(self, number: int, position: int, size: int, capacity: int) -> None:
        self.number = number
        self.position = position  # of its first sample
        self.expected = size  # samples; lower once the epoch's end is known to be in the batch
        self.wanted = size  # samples needed: those up to the first known failure
        self.capacity = capacity
        self.count = 1  # batches
        self.state = BatchState.OPEN
        self.parts: dict[int, Part] = {}  # by slot; kept until the batch is made, for a retry
        self.made: dict[int, Part] = {}  # by slot; results for parts that another worker collates
        self.arrived = 0  # samples, including those no longer needed
        self.seen = 0  # needed samples
        self.under_way: set[int] = set()  # the first slots of tasks
        self.use_slots = True
        self.is_spread = False  # all workers make its samples, one collates them
        self.is_left_out = False  # dropped as a short last batch: only its errors are reported
        self.slab: Lease | None = None
        self.made_s = 0.0
        self.nbytes = 0  # of the result
        self.slab_lock = asyncio.Lock()
        self.columns: dict[int, list[list[object]]] = {}
        self.holes: list[int] = []  # empty slots: the last ones of tasks with errors
        self.errors: dict[int, PackedError] = {}
        self.ended_by: PackedError | None = None
        self.delivery: Delivery | None = None  # of the samples that have not failed; None without such
        self.places: Sequence[tuple[int, ...]] = ()  # of each of several batches: see `ChunkDelivery.outcomes`

    @property
    def size(self) -> int:
        """Number of samples per batch."""
        return self.expected // self.count

    @property
    def is_over(self) -> bool:
        """True if the result of the batch is settled."""
        return self.state in (BatchState.READY, BatchState.DELIVERED)

    @property
    def is_whole(self) -> bool:
        """True if all needed samples have arrived, and no worker has any of them."""
        if self.seen < self.wanted:
            return False
        if self.wanted == self.expected:
            return not self.under_way
        return all(slot >= self.wanted for slot in self.under_way)

    def take_in(self, slot: int, part: Part) -> Part | None:
        """Store samples that arrived at `slot`. Returns the needed ones, which the batch holds."""
        self.arrived += part.count
        count = min(part.count, self.wanted - slot)
        if count <= 0:
            part.release()
            return None
        if count < part.count:
            part = _shortened(part, count)
        self.parts[slot] = part
        self.seen += count
        return part

    def end_with(self, slot: int, error: PackedError | None = None) -> None:
        """End the batch at a failed sample. Only an earlier failure would be reported instead.

        `error` is given if the samples may be made again and may not fail then.
        """
        if slot >= self.wanted:
            return
        self.wanted, self.ended_by = slot + 1, error
        for start, part in list(self.parts.items()):
            if start >= self.wanted:
                self.parts.pop(start).release()
            elif start + part.count > self.wanted:
                self.parts[start] = _shortened(part, self.wanted - start)
        self.seen = sum(part.count for part in self.parts.values())

    def shorten(self, size: int) -> bool:
        """Reduce the batch to `size` samples, as the epoch ends in it. False if known before."""
        if self.expected == size:
            return False
        self.expected, self.wanted = size, min(self.wanted, size)
        return True

    def release_parts(self) -> None:
        self.release(self.parts)
        self.release(self.made)

    @staticmethod
    def release(parts: dict[int, Part]) -> None:
        for part in parts.values():
            part.release()
        parts.clear()

    def release_slab(self) -> None:
        if self.slab is not None:
            self.slab.release()
            self.slab = None


def _shortened(part: Part, count: int) -> Part:
    kept = part.cut(0, count)
    part.release()
    return kept
