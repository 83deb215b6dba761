"""Specification of an epoch: its batches and stages, its plan, and resources of the loader."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from headrace._util.shared_memory import LARGE_BYTES, Arena
from headrace.engine.scheduler.dispatch import Budget
from headrace.engine.scheduler.position_map import BatchBoundaries, PositionMap
from headrace.observe import LoaderMeters
from headrace.types import Batcher
from headrace.workers.failures import ErrorPacker
from headrace.workers.sample_chunks import Part

if TYPE_CHECKING:
    from headrace.delivery.slabs import Slabs
    from headrace.engine.scheduler.skip_rules import Skips
    from headrace.readers.protocol import Producer
    from headrace.workers.queue import TaskQueue

_MAX_CHUNK = 256
_WORTH_S = 1e-3  # minimum work per task
_QUICK_S = 0.05  # work of a batch that is not divided
_GROUPED = 64  # samples assumed per group


@dataclass(frozen=True, slots=True)
class WorkStage:
    """Steps run by workers, as a chain. `gives_many`: one sample may become many."""

    chain: int
    gives_many: bool = False


@dataclass(frozen=True, slots=True)
class LoopStage:
    """Steps run on the event loop, for all samples of some parts at once.

    `run` takes parts, positions and RNG key, and returns the result and the input index of each sample.
    """

    run: Callable[[Sequence[Part], Sequence[int], int], Awaitable[tuple[Part, Sequence[int]]]]
    gives_many: bool = False


@dataclass(frozen=True, slots=True)
class GroupStage:
    """Groups samples and runs a chain on each group, which gives one or many samples.

    Attributes:
        batcher: Returns a new batcher. None: packed rows determine the groups.
        is_measured: True if workers measure each sample; else the measure is 1.
        max_wait_s: Time limit for the first sample of a group. None: no limit.
    """

    chain: int
    batcher: Callable[[], Batcher] | None
    name: str
    is_measured: bool = False
    max_wait_s: float | None = None
    gives_many: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class LimitStage:
    """Passes samples on unchanged, in order. Separates a level that has its own limit."""

    gives_many: ClassVar[bool] = False


InnerStage = WorkStage | LoopStage | GroupStage | LimitStage


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How samples become batches. Fixed for a loader, except for the rank's batch size.

    Attributes:
        chain: Chain of the last stage, which collates.
        batch_size: Samples per batch. None: the source determines each.
        keeps_count: True if each source sample becomes one sample of a batch.
        look_ahead: Number of samples that may be ready beyond the batches that may be sent.
        is_spread: True if all workers make the samples of a batch without slots, and one collates them. False: one
            worker does both.
        collations: Maximum number of batches collated at once, if spread. None: no limit.
        is_adaptive: True if tasks grow for fast samples. False: their size is fixed.
        depth: Maximum number of batches under way. 0: not known.
        together: Maximum number of batches per task and message.
        publishes: True if batches of a task do not wait for each other, as a function of the user may take long, or
            wait for the trainer.
        is_input: True if samples go to another epoch, and not to batches.
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
    publishes: bool = False
    is_input: bool = False

    @property
    def gives_many(self) -> bool:
        return any(stage.gives_many for stage in self.inner)

    @property
    def has_groups(self) -> bool:
        """True if samples are grouped, so that the number of source samples per batch is not known."""
        return any(isinstance(stage, GroupStage) for stage in self.inner)

    @property
    def begins_on_loop(self) -> bool:
        """True if coroutine functions are the first stage."""
        return bool(self.inner) and type(self.inner[0]) is LoopStage

    @property
    def is_timed(self) -> bool:
        """True if groups have a time limit, so that each sample is passed on immediately."""
        return any(isinstance(stage, GroupStage) and stage.max_wait_s is not None for stage in self.inner)

    @property
    def together_before(self) -> int:
        """Maximum number of samples per task before the last stage."""
        if self.is_timed:
            return 1
        return min(_MAX_CHUNK, self.look_ahead) if self.depth else 1

    def gathered(self, batch_size: int) -> int:
        """Estimate the source samples made for a batch, limited by `look_ahead`."""
        is_open = self.is_input or (self.has_groups and self.depth)
        return max(batch_size, min(_GROUPED, self.look_ahead)) if is_open else batch_size

    def chunk(self, batch_size: int, sample_s: float) -> int:
        """Return the maximum number of a batch's samples per task.

        Each worker gets two or more tasks of a batch, or fewer if a task would not be worth its message.
        """
        if self.is_timed:
            return 1
        if self.is_quick(batch_size, sample_s):
            return batch_size
        share = max(1, min(_MAX_CHUNK, math.ceil(batch_size / (2 * self.workers))))
        return min(batch_size, max(share, int(_WORTH_S / sample_s))) if self.is_adaptive and sample_s else share

    def is_quick(self, batch_size: int, sample_s: float) -> bool:
        """True if one task should make the batch: it is fast, and each worker can have one."""
        known = self.is_adaptive and sample_s > 0 and self.depth >= self.workers
        return known and batch_size * sample_s < _QUICK_S

    def wants_place(self, nbytes: int, count: int) -> bool:
        """True if memory for the result is allocated before the samples are made.

        Large results are made first, as their inputs stay in memory until then. With many samples per batch the inputs
        are a small part.
        """
        return nbytes <= LARGE_BYTES * count


@dataclass(slots=True)
class Learned:
    """Statistics of a loader's samples, collected over epochs.

    Attributes:
        use_slots: True if samples are written into slots; False once that has proved impossible.
        sample_s: Seconds of a worker per sample. 0: not known yet.
        form: Spec of a sample, once a worker has reported it.
        batch_bytes: Size of the largest batch collated by one worker that is allocated in advance.
    """

    use_slots: bool
    sample_s: float = 0.0
    form: bytes | None = None
    form_size: int = 0
    form_capacity: int = 0
    batch_bytes: int = 0

    def learn_time(self, seconds: float, count: int) -> None:
        last = seconds / max(1, count)
        self.sample_s = last if not self.sample_s else 0.9 * self.sample_s + 0.1 * last


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSpec:
    """The plan of one run.

    Attributes:
        learned: Statistics of earlier epochs.
        key: Seed of the samples' random numbers, combined with their positions.
        limits: Maximum number of samples per level, the last for batches (None: no limit). Empty: no limits.
        skips: Decides on failed samples. None: they are raised.
        pass_count: Samples of one pass over a source that repeats without end. None: it ends, or reports the number
            itself.
    """

    source: Producer
    batches: BatchSpec
    learned: Learned
    key: int
    boundaries: BatchBoundaries
    position_map: PositionMap = field(default_factory=PositionMap)
    limits: tuple[int | None, ...] = ()
    skips: Skips | None = None
    pass_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources shared by all epochs of a loader.

    `copies` is the number of copies of the objects' bytes during `wrap`, which makes a part of Python objects.
    """

    works: TaskQueue
    slabs: Slabs
    arena: Arena
    budget: Budget
    meters: LoaderMeters
    wrap: Callable[[list[Any]], Part]
    copies: int
    pack_error: ErrorPacker
