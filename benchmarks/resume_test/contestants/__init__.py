"""Libraries that take the resume test, each by the way that its own documentation recommends.

A contestant makes the data set in a form that the library likes, and gives the numbers of the samples of each batch.
Nothing in here knows which scenario is being played.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7
SHARDS = 24


class NoStateError(Exception):
    """The library has nothing to save."""


@dataclass(frozen=True)
class Setting:
    """The settings of a trainer."""

    folder: str
    samples: int
    batch_size: int  # of this rank
    num_workers: int
    reads: str  # the file that gets a byte for each sample read
    rank: int = 0
    world: int = 1

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world


class Contestant:
    """A library as one rank of a trainer uses it, by a loader with states as torchdata's; made once in each process."""

    loader: Any

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.count = Reads(setting.reads)

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        """Make the data set, if it has files: samples 0 to `samples` - 1, in SHARDS shards where there are shards."""

    def epoch(self, number: int) -> Iterator[list[int]]:
        """The samples of each batch of an epoch; after `load` those of the rest of the epoch that the state is of."""
        for batch in self.loader:
            yield batch.tolist()

    def state(self) -> Any:
        """The state after the batch that was received last."""
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Resume, before the first epoch of this process, from the states of all ranks there were."""
        self.loader.load_state_dict(self.state_of_this_rank(states))

    def state_of_this_rank(self, states: list[Any]) -> Any:
        """Its own where it had one; a rank that is new takes rank 0's."""
        return states[self.setting.rank] if self.setting.rank < len(states) else states[0]


class Reads:
    """Notes each sample that passes through, from whichever process."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, sample: Any) -> Any:
        descriptor = _opened.get((os.getpid(), self.path))
        if descriptor is None:
            descriptor = _opened[os.getpid(), self.path] = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        return sample


_opened: dict[tuple[int, str], int] = {}


def write_tars(folder: Path, samples: int) -> list[str]:
    """Tar shards of samples that hold their number."""
    paths = []
    for shard, numbers in enumerate(np.array_split(np.arange(samples), SHARDS)):
        paths.append(str(folder / f"{shard:02d}.tar"))
        with tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in numbers.tolist():
                body = str(number).encode()
                member = tarfile.TarInfo(f"{number:07d}.cls")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
    return paths


@dataclass(frozen=True)
class Entry:
    """Where a contestant is, and what it needs."""

    label: str
    place: str  # module:class
    needs: tuple[str, ...] = ()  # distributions beside torch; the version is the first one's

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if not _is_installed(name)]

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.needs[0] if self.needs else "torch")
        except importlib.metadata.PackageNotFoundError:
            return "checkout"

    def load(self) -> type[Contestant]:
        module, _, name = self.place.partition(":")
        found: type[Contestant] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return found


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return distribution == "headrace" and importlib.util.find_spec("headrace") is not None  # run from its checkout
    return True


HEADRACE = {
    "headrace": Entry("headrace, tar shards with an index", "headrace:Shards", ("headrace",)),
    "headrace_keys": Entry("headrace, AsyncDataset", "headrace:Keys", ("headrace",)),
}
PACKED = {  # what is counted are tokens
    "headrace_packed": Entry("headrace, .pack with known lengths", "headrace:Packed", ("headrace",)),
    "headrace_mixed": Entry("headrace, mix by tokens, filter, .pack", "headrace:MixedByTokens", ("headrace",)),
}
PEERS = {
    "torch": Entry("torch DataLoader", "torch_dl:Plain"),
    "torchdata": Entry("torchdata StatefulDataLoader", "torch_dl:Stateful", ("torchdata",)),
    "datasets": Entry("datasets, buffer of 300", "datasets:Buffered", ("datasets", "torchdata")),
    "datasets_in_order": Entry("datasets, no shuffle", "datasets:InOrder", ("datasets", "torchdata")),
    "grain": Entry("Grain DataLoader", "grain:Loader", ("grain",)),
    "grain_elastic": Entry("Grain ElasticIterator", "grain:Elastic", ("grain",)),
    "grain_packed": Entry("Grain FirstFitPackIterDataset", "grain:Packed", ("grain",)),
    "litdata": Entry("LitData", "litdata:Streaming", ("litdata",)),
    "mosaic": Entry("MosaicML Streaming", "mosaic:Streaming", ("mosaicml-streaming",)),
    "webdataset": Entry("WebDataset", "wds:Shards", ("webdataset",)),
}
ALL = HEADRACE | PACKED | PEERS
