"""What is fixed for all epochs of a loader: how its samples become batches, and who works on them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from headrace.memory import LARGE_BYTES, Lease
from headrace.parts import Part
from headrace.tasks import Reply, Task
from headrace.types import Batcher

_MAX_CHUNK = 256
_WORTH_S = 1e-3  # of work, for one task
_QUICK_S = 0.05  # of work for all samples of a batch
_GROUPED = 64  # samples that may be needed for a group


class Works(Protocol):
    """The work stage as the scheduler sees it."""

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply: ...

    async def place(self, task: Task, place: Lease) -> Reply: ...

    def abandon(self, task: Task) -> None: ...


class SlabAllocator(Protocol):
    """Places for whole batches."""

    async def acquire(self, size: int, rank: int, is_urgent: Callable[[], bool]) -> Lease: ...

    def hand_out(self, lease: Lease) -> None: ...

    def returned(self, number: int) -> None: ...

    def changed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkStage:
    """Steps that workers do; the chain with this number.

    Attributes:
        gives_many: whether many samples may come of one.
    """

    chain: int
    gives_many: bool = False


@dataclass(frozen=True, slots=True)
class LoopStage:
    """Steps that the event loop does: all samples of a part at once; says of which of them those that are left are.

    Attributes:
        run: takes a part, the positions of its samples, and the key of their random numbers.
        gives_many: whether many samples may come of one.
    """

    run: Callable[[Part, Sequence[int], int], Awaitable[tuple[Part, Sequence[int]]]]
    gives_many: bool = False


@dataclass(frozen=True, slots=True)
class GroupStage:
    """Some samples are put together; the chain with this number does it, and gives one or many.

    Attributes:
        batcher: begins what says which ones; None: lanes do.
        name: what errors call it.
        is_measured: whether workers tell a measure of each sample; else it is 1.
        max_wait_s: how long the first sample of a group waits for others; None: as long as it takes.
    """

    chain: int
    batcher: Callable[[], Batcher] | None
    name: str
    is_measured: bool = False
    max_wait_s: float | None = None
    gives_many: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class LimitStage:
    """Samples go on as they are, in order: what comes before is counted, where a limit of its own ends it."""

    gives_many: ClassVar[bool] = False


InnerStage = WorkStage | LoopStage | GroupStage | LimitStage


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How samples become batches: what is fixed for all epochs of a loader, but for the size that one has on its rank.

    Attributes:
        inner: the stages before the last one.
        chain: the last stage's chain: it collates.
        batch_size: samples in a batch; None: as many as the source says for each.
        workers: who share a batch's samples.
        drop_last: leave a short last batch out.
        keeps_count: whether each sample put by the source becomes one sample of a batch.
        look_ahead: how many samples may lie ready beyond the batches that may be sent.
        in_order: whether batches come in plan order.
        is_spread: whether all workers make the samples of a batch that has no slots too, and one collates them; False:
            one does both.
        collations: how many batches may be collated at once, where they are spread; None: any number.
        is_adaptive: whether tasks have more samples where those are made in no time; False: their number is fixed.
        depth: how many batches are under way at most; 0: not known.
        together: where batches are single samples, how many of them are made by one task at most, and go to the trainer
            together; 1: each is a batch like others.
    """

    chain: int
    batch_size: int | None
    workers: int
    inner: tuple[InnerStage, ...] = ()
    drop_last: bool = False
    keeps_count: bool = True
    look_ahead: int = 0
    in_order: bool = True
    is_spread: bool = False
    collations: int | None = None
    is_adaptive: bool = False
    depth: int = 0
    together: int = 1

    @property
    def gives_many(self) -> bool:
        """Whether many samples may come of one."""
        return any(stage.gives_many for stage in self.inner)

    @property
    def has_groups(self) -> bool:
        """Whether samples are put together on the way, so that nobody knows how many make a batch."""
        return any(isinstance(stage, GroupStage) for stage in self.inner)

    @property
    def is_timed(self) -> bool:
        """Whether samples wait for one another for some time only, so that each is handed on as soon as it is there."""
        return any(isinstance(stage, GroupStage) and stage.max_wait_s is not None for stage in self.inner)

    @property
    def together_before(self) -> int:
        """How many samples are made by one task at most before the last stage."""
        return min(_MAX_CHUNK, self.look_ahead) if self.has_groups and self.depth else self.together

    def gathered(self, batch_size: int) -> int:
        """How many samples are made for a batch of so many, about: no more than may lie ready."""
        return max(batch_size, min(_GROUPED, self.look_ahead)) if self.has_groups and self.depth else batch_size

    def chunk(self, batch_size: int, sample_s: float) -> int:
        """How many samples of a batch go into one task, at most.

        Each worker has two or more tasks of it; fewer where a task would be worth less than the message that it is.

        Args:
            sample_s: seconds that a worker needs for a sample; 0: not known yet.
        """
        if self.is_quick(batch_size, sample_s):
            return batch_size
        share = max(1, min(_MAX_CHUNK, math.ceil(batch_size / (2 * self.workers))))
        return min(batch_size, max(share, int(_WORTH_S / sample_s))) if self.is_adaptive and sample_s else share

    def is_quick(self, batch_size: int, sample_s: float) -> bool:
        """Whether it is better not to divide a batch: it takes so little, and each worker can have one of its own."""
        known = self.is_adaptive and sample_s > 0 and self.depth >= self.workers
        return known and batch_size * sample_s < _QUICK_S

    def wants_place(self, nbytes: int, count: int) -> bool:
        """Whether a place of so many bytes is made before the samples that go there; large ones are made first.

        What they are made of is in memory until then. Of many samples in a batch that is a small part.
        """
        return nbytes <= LARGE_BYTES * count


@dataclass(slots=True)
class Learned:
    """What the epochs of a loader have found out about its samples, and go by.

    Attributes:
        use_slots: whether samples are written into slots; False once it has shown that they cannot.
        sample_s: seconds that a worker needs for a sample; 0: not known yet.
        form: the form of a sample, once a worker has told it.
        form_size, form_capacity: bytes and slots of a slab that is filled in that form.
        batch_bytes: of the largest batch so far that was collated by one worker and wants a place.
    """

    use_slots: bool
    sample_s: float = 0.0
    form: bytes | None = None
    form_size: int = 0
    form_capacity: int = 0
    batch_bytes: int = 0

    def learn_time(self, seconds: float, count: int) -> None:
        """A worker has made `count` samples in so many seconds."""
        last = seconds / max(1, count)
        self.sample_s = last if not self.sample_s else 0.9 * self.sample_s + 0.1 * last
