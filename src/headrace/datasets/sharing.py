"""Data sets that divide their samples among ranks themselves: what they are told."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import OptionError

RanksBy = Literal["shard_info", "position"]
"""How the samples of an iterable data set are divided among ranks; see `AsyncIterableDataset.ranks_by`."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of an epoch's samples an iterable data set is to give.

    Attributes:
        rank: the number of the part.
        world: how many parts there are.
        epoch: the epoch's number.
        seed: the loader's, the same on all ranks.
    """

    rank: int
    world: int
    epoch: int
    seed: int


@dataclass(slots=True)
class Asked:
    """What one run of `aiter` is told, and whether it has asked for it."""

    info: ShardInfo
    is_asked: bool = field(default=False, init=False)


running_shard: ContextVar[Asked | None] = ContextVar("headrace_running_shard", default=None)
"""What `shard_info` answers here; set where `aiter` runs."""


def shard_info() -> ShardInfo:
    """Which part of the samples this run of `aiter` is to give; also in the function that `hr.from_iterable` is given.

    On one rank it is part 0 of 1. Ask before the first sample, in each epoch.

    Raises:
        OptionError: no loader runs this.

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
