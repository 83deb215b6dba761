"""What is fixed for all epochs of a loader: how its samples become batches, and who works on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.memory import Lease
from headrace.tasks import Part, Reply, Task


class Works(Protocol):
    """The work stage as the scheduler sees it."""

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply: ...

    async def place(self, task: Task, place: Lease) -> Reply: ...

    def abandon(self, task: Task) -> None: ...


class Slabs(Protocol):
    """Places for whole batches."""

    async def acquire(self, size: int, rank: int, is_urgent: Callable[[], bool]) -> Lease: ...

    def hand_out(self, lease: Lease) -> None: ...

    def returned(self, number: int) -> None: ...

    def changed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkStage:
    """Steps that workers do; the chain with this number."""

    chain: int


@dataclass(frozen=True, slots=True)
class LoopStage:
    """Steps that the event loop does: all samples of a part, with their positions, at once."""

    run: Callable[[Part, Sequence[int]], Awaitable[tuple[Part, Sequence[int]]]]


@dataclass(slots=True)
class Recipe:
    """How a loader's samples become batches; the same for all of its epochs.

    Attributes:
        inner: the stages before the last one.
        chain: the last stage's chain: it collates.
        batch_size: samples in a batch.
        chunk: samples in one task, at most.
        workers: who share a batch's samples.
        drop_last: leave a short last batch out.
        keeps_count: whether each sample put by the source becomes one sample of a batch.
        limit: how many samples an epoch has at most, counted where batches are cut.
        look_ahead: how many samples may lie ready beyond the batches that may be sent.
        in_order: whether batches come in plan order.
        spec: the form of a sample, once a worker has told it.
        use_slots: whether samples are written into slots; False once it has shown that they cannot.
        batch_bytes: of the largest batch so far that was collated by one worker.
    """

    inner: tuple[WorkStage | LoopStage, ...]
    chain: int
    batch_size: int
    chunk: int
    workers: int
    drop_last: bool
    keeps_count: bool
    limit: int | None
    look_ahead: int
    in_order: bool
    use_slots: bool
    spec: bytes | None = None
    spec_size: int = 0
    batch_bytes: int = 0
