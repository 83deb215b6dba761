"""The parts that an epoch is built from: its plan, and resources of the loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace._util.shared_memory import Arena
from headrace.engine.scheduler.batch_bounds import BatchBoundaries
from headrace.engine.scheduler.batch_spec import BatchSpec, Learned
from headrace.engine.scheduler.budget import Budget
from headrace.engine.scheduler.position_map import PositionMap
from headrace.engine.scheduler.skip_rules import Skips
from headrace.observe.stats import LoaderMeters
from headrace.workers.failures import ErrorPacker
from headrace.workers.sample_chunks import Part

if TYPE_CHECKING:
    from headrace.delivery.slabs import Slabs
    from headrace.readers.protocol import Producer
    from headrace.workers.queue import TaskQueue


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
