"""One batch in the making: its samples, where they are written, and which of them have failed."""

from __future__ import annotations

import asyncio
from enum import Enum

from headrace.delivery import Delivery
from headrace.failures import PackedError
from headrace.memory import Lease
from headrace.parts import Part


class BatchState(Enum):
    """open → filling → collating → ready → delivered; its lease ends with the trainer's last view of it."""

    OPEN = "open"
    FILLING = "filling"
    COLLATING = "collating"
    READY = "ready"
    DELIVERED = "delivered"


class OpenBatch:
    """One batch, from its first sample to its delivery.

    Args:
        size: how many samples it has; the last one of an epoch may turn out to have fewer.
        capacity: slots, if it has any.
    """

    def __init__(self, number: int, position: int, size: int, capacity: int) -> None:
        self.number = number
        self.position = position  # of its first sample
        self.expected = size  # samples; less once the end of the epoch is known to be in it
        self.wanted = size  # samples that decide what comes of it: those up to the first that is known to have failed
        self.capacity = capacity
        self.state = BatchState.OPEN
        self.parts: dict[int, Part] = {}  # by slot; held until the batch is made, to make it again if need be
        self.made: dict[int, Part] = {}  # by slot; what became of the parts, where that is collated by another
        self.arrived = 0  # samples, with those that are not wanted any more
        self.seen = 0  # samples among the wanted ones
        self.under_way: set[int] = set()  # the first slots of tasks
        self.use_slots = True
        self.is_spread = False  # its samples are made, or being made, by all workers, to be collated by one
        self.is_left_out = False  # as a last one that is short: only errors in it are told
        self.slab: Lease | None = None
        self.slab_lock = asyncio.Lock()
        self.columns: dict[int, list[list[object]]] = {}
        self.holes: list[int] = []  # slots that hold no sample: those of a task that has errors are its last ones
        self.errors: dict[int, PackedError] = {}
        self.ended_by: PackedError | None = None
        self.delivery: Delivery | None = None  # of the samples that have not failed; None: there are none

    @property
    def is_over(self) -> bool:
        """Whether it is settled what comes of it."""
        return self.state in (BatchState.READY, BatchState.DELIVERED)

    @property
    def is_whole(self) -> bool:
        """Whether all samples that are wanted are there, and no worker has any of them."""
        if self.seen < self.wanted:
            return False
        if self.wanted == self.expected:
            return not self.under_way
        return all(slot >= self.wanted for slot in self.under_way)

    def take_in(self, slot: int, part: Part) -> Part | None:
        """Samples have arrived at `slot`; gives those that are wanted, which the batch holds."""
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
        """The sample in this slot has failed, and the batch with it: only a failure before it would be told instead.

        Args:
            error: where the samples may be made again, and not fail then.
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
        """The epoch ends with this batch, which has no more than `size` samples; whether that was not known."""
        if self.expected == size:
            return False
        self.expected, self.wanted = size, min(self.wanted, size)
        return True

    def release_parts(self) -> None:
        """Let go of its samples."""
        self.release(self.parts)
        self.release(self.made)

    @staticmethod
    def release(parts: dict[int, Part]) -> None:
        """Let go of parts by slot."""
        for part in parts.values():
            part.release()
        parts.clear()

    def release_slab(self) -> None:
        """Let go of its place."""
        if self.slab is not None:
            self.slab.release()
            self.slab = None


def _shortened(part: Part, count: int) -> Part:
    """The first samples of a part, which gives up its leases."""
    kept = part.cut(0, count)
    part.release()
    return kept
