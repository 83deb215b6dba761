"""headrace: streams of shards (W2, W4) and an async data set (W1, W5), with two worker processes and torch's collate.

"nw2" is measured with headrace's helper process ready: it imports torch once per trainer (about a second), as the other
contestants' imports are not timed either. "nw2-cold" has that second in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from workloads import Work

import headrace as hr

VARIANTS = {"nw2": {"num_workers": 2}, "nw2-cold": {"num_workers": 2, "cold": True}}
WORKLOADS = {name: ["nw2", "nw2-cold"] for name in ("W1", "W2", "W4", "W5")}
PACKAGES = ["headrace", "torch", "obstore"]

WARM: list[hr.DataLoader[Any]] = []
"""A loader that has done an epoch and stays alive, so that the helper process is there."""


class Indices(hr.AsyncDataset):
    """The index is the sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    async def aget(self, index: int) -> int:
        return index


class Objects(hr.AsyncDataset):
    """One object per sample: (bytes, label)."""

    def __init__(self, work: Work) -> None:
        self.work, self.objects = work, work.objects()

    def __len__(self) -> int:
        return len(self.objects)

    async def aget(self, index: int) -> tuple[bytes, int]:
        key, label = self.objects[index]
        return await hr.read(self.work.url(key)), label


class Sample:
    """What the data set gives to (tensor, label); runs in the workers."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, sample: Any) -> tuple[torch.Tensor, int]:
        if self.work.kind == "tar":
            return self.work.apply(sample[self.work.field]), int(sample["cls"])
        if self.work.kind == "files":
            return self.work.apply(sample[0]), sample[1]
        return self.work.apply(sample), self.work.label(sample)


def warm_up(workers: int = 1) -> hr.DataLoader[Any]:
    """A loader that has done one small epoch: the helper process is ready, and forks workers in milliseconds."""
    loader = hr.DataLoader(Indices(4 * workers), batch_size=4, num_workers=workers)
    for _ in loader:
        pass
    return loader


def prepare(_work: Work, parameters: Mapping[str, Any]) -> None:
    """Start the helper process, unless its start is to be measured."""
    if not parameters.get("cold"):
        WARM.append(warm_up())


def run(work: Work, parameters: Mapping[str, Any]) -> hr.DataLoader[Any]:
    """One epoch: loose objects shuffled, shards in their order."""
    if work.kind == "tar":
        dataset = hr.stream([work.url(shard) for shard in work.shards()])
    else:
        dataset = Objects(work) if work.kind == "files" else Indices(work.samples)
    options = {name: value for name, value in parameters.items() if name != "cold"}
    if work.kind == "files":
        options["shuffle"] = True
    return hr.DataLoader(dataset.map(Sample(work), random=False), batch_size=work.batch, **options)
