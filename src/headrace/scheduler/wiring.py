"""What one epoch is made of: what it goes through, and what of the loader it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.channel import Sender
from headrace.failures import ErrorPacker
from headrace.memory import Arena
from headrace.observe.stats import LoaderMeters
from headrace.parts import Part
from headrace.producer import Producer
from headrace.scheduler.boundaries import BatchBoundaries
from headrace.scheduler.budget import Budget
from headrace.scheduler.dispatch import Dispatch
from headrace.scheduler.position_map import PositionMap
from headrace.scheduler.recipe import BatchSpec, Learned, SlabAllocator, Works
from headrace.scheduler.skips import Skips


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSpec:
    """What one run goes through.

    Attributes:
        source: gives the samples.
        batches: how they become batches.
        learned: what the epochs before have found out about them.
        key: from which, with their positions, the samples' random numbers are made.
        boundaries: where the samples are cut into batches.
        position_map: where in the epoch they are.
        limits: how many samples each level gives at most, and the last one to batches (None: all); empty: all do.
        skips: says which failed samples are left out; None: none is.
        pass_count: samples of one pass, where the source begins again without end; None: it ends, or tells them itself.
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
    """What all epochs of a loader share.

    Attributes:
        works: the loader's workers.
        slabs: its places for batches.
        arena: its memory for what is read.
        budget: how much of that may be in use.
        meters: where waiting and queues are counted.
        wrap: makes a part of Python objects.
        copies: how many copies of those objects' bytes there are while it does.
        pack_error: packs an exception.
    """

    works: Works
    slabs: SlabAllocator
    arena: Arena
    budget: Budget
    meters: LoaderMeters
    wrap: Callable[[list[Any]], Part]
    copies: int
    pack_error: ErrorPacker


@dataclass(frozen=True, slots=True)
class Outlet:
    """What an epoch's batches leave it by, whatever makes them.

    Attributes:
        spec: the epoch.
        resources: what it runs on.
        dispatch: has tasks worked on.
        sender: where batches go; its credits say how many messages may be begun.
        moved: called when the oldest batch is another one.
        finished: called when the last batch of the epoch was delivered.
    """

    spec: EpochSpec
    resources: Resources
    dispatch: Dispatch
    sender: Sender
    moved: Callable[[], None]
    finished: Callable[[], None]
