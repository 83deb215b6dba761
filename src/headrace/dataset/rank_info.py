"""The part of an epoch that an iterable data set yields on this rank: `hr.shard_info()`."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import OptionError

RanksBy = Literal["shard_info", "position"]
"""How ranks divide the samples of an iterable data set; see `AsyncIterableDataset.ranks_by`."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The part of an epoch's samples that an iterable data set is to yield.

    Attributes:
        rank: Index of the part.
        world: Number of parts.
        epoch: Number of the epoch.
        seed: Seed of the loader, the same on all ranks.
    """

    rank: int
    world: int
    epoch: int
    seed: int


@dataclass(slots=True)
class Asked:
    """The `ShardInfo` of one run of `aiter`, and whether that run has read it."""

    info: ShardInfo
    is_asked: bool = field(default=False, init=False)


running_shard: ContextVar[Asked | None] = ContextVar("headrace_running_shard", default=None)
"""Result of `shard_info`; set where `aiter` runs."""


def shard_info() -> ShardInfo:
    """Return the part of the samples that this run of `aiter` is to yield.

    Also works in the function passed to `hr.from_iterable`. On one rank it is part 0 of 1. Call it before the first
    sample, in each epoch.

    Raises:
        OptionError: No loader runs this.

    Examples:
        >>> import headrace as hr
        >>> class Numbers(hr.AsyncIterableDataset):
        ...     ranks_by = "shard_info"
        ...     async def aiter(self):
        ...         part = hr.shard_info()
        ...         for number in range(part.rank, 8, part.world):
        ...             yield number
        >>> data = Numbers().epoch(samples=8)
        >>> [list(hr.DataLoader(data, batch_size=None, rank=rank, world_size=2)) for rank in range(2)]
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    asked = running_shard.get()
    if asked is None:
        raise OptionError(
            "hr.shard_info() answers in the aiter() that a loader runs, and in tasks and threads that are started with "
            "its context, as asyncio.to_thread does; here there is no epoch"
        )
    asked.is_asked = True
    return asked.info
