"""Streams run by inner loaders, for this rank's part of the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.datasets.asynchronous import AsyncIterableDataset, IterSource
from headrace.datasets.sharing import shard_info
from headrace.datasets.stream import Stream
from headrace.plan import draw
from headrace.running import running_workers

if TYPE_CHECKING:
    from headrace.loader import DataLoader


class WithinDataset(AsyncIterableDataset):
    """Base class of iterable data sets that iterate over other streams by `loaders`."""

    ranks_by = "shard_info"
    name = ""
    why_no_state: str | None = None

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)

    def __sample_source__(self) -> WithinSource:
        return WithinSource(self)

    @property
    def text(self) -> str:
        raise NotImplementedError

    def indexed(self) -> Stream | None:
        return None

    def loaders(self) -> list[DataLoader[Any]]:
        """Create a loader per stream for this rank and epoch, with the outer loader's workers."""
        from headrace.loader import single_samples  # imports torch

        part = shard_info()
        loaders: list[DataLoader[Any]] = []
        for number, stream in enumerate(self.streams):
            pipeline = stream.pipeline()
            is_worked_on = bool(pipeline.steps or pipeline.regroups or pipeline.group)
            loader = single_samples(
                stream,
                rank=part.rank,
                world_size=part.world,
                ranks="local",
                seed=draw("input", part.seed, number) if len(self.streams) > 1 else part.seed,
                num_workers=running_workers.get() if is_worked_on else 0,
            )
            loader.set_epoch(part.epoch)
            loaders.append(loader)
        return loaders


class WithinSource(IterSource):
    data: WithinDataset

    def __init__(self, data: WithinDataset) -> None:
        super().__init__(data)
        self.why_no_state = data.why_no_state

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def text(self) -> str:
        return self.data.text

    def indexed(self) -> Stream | None:
        return self.data.indexed()

    @property
    def inputs(self) -> Sequence[tuple[str, Stream]]:
        return [(str(number), stream) for number, stream in enumerate(self.data.streams)]
