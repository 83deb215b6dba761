"""Streams run by inner loaders, for this rank's part of the epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace._util.context import running_workers
from headrace.dataset.asynchronous import AsyncIterableDataset, IterSource
from headrace.dataset.rank_info import shard_info
from headrace.dataset.stream import Stream
from headrace.order import draw

if TYPE_CHECKING:
    from headrace.loader import DataLoader


class WithinDataset(AsyncIterableDataset):
    """Base class of iterable data sets that iterate over other streams by `loaders`."""

    ranks_by = "shard_info"
    name = ""
    why_no_state: str | None = None
    makes_batches = False

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)

    def __sample_source__(self) -> WithinSource:
        return WithinSource(self)

    @property
    def text(self) -> str:
        raise NotImplementedError

    def indexed(self) -> Stream | None:
        return None

    @property
    def described(self) -> str:
        """Text in states. Different texts mean different samples."""
        return self.name

    def loaders(self, number_of_pass: int = 0) -> list[DataLoader[Any]]:
        """Create a loader per stream for this rank, epoch and pass, with the outer loader's workers."""
        from headrace.loader import single_samples  # imports torch

        part = shard_info()
        own_seed = draw("pass", part.seed, number_of_pass) if number_of_pass else part.seed
        loaders: list[DataLoader[Any]] = []
        for number, stream in enumerate(self.streams):
            pipeline = stream.pipeline()
            is_worked_on = bool(pipeline.steps or pipeline.regroups or pipeline.group)
            is_grouped = pipeline.group is not None or pipeline.puts_together is not None
            loader = single_samples(
                stream,
                rank=part.rank,
                world_size=part.world,
                ranks="local",
                seed=draw("input", own_seed, number) if len(self.streams) > 1 else own_seed,
                num_workers=running_workers.get() if is_worked_on else 0,
                on_error="raise" if is_grouped else _in_place,
            )
            loader.set_epoch(part.epoch)
            loaders.append(loader)
        return loaders


def _in_place(error: BaseException) -> bool:  # noqa: ARG001
    """Skip no sample. Its error is raised in its place, by itself, and the outer loader decides."""
    return False


class WithinSource(IterSource):
    data: WithinDataset

    def __init__(self, data: WithinDataset) -> None:
        super().__init__(data)
        self.why_no_state, self.makes_batches = data.why_no_state, data.makes_batches

    def fingerprint(self) -> str:
        return hashlib.blake2b(self.data.described.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

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
