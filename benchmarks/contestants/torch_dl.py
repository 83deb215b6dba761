"""torch's DataLoader as most people use it: one blocking GET per sample, or a tar stream per worker."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import urllib3
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from workloads import Work, collate

VARIANTS = {"nw2": {"num_workers": 2}, "nw8": {"num_workers": 8}, "nw32": {"num_workers": 32}}
WORKLOADS = {"W1": ["nw8", "nw32"], "W2": ["nw2"], "W4": ["nw2"], "W5": ["nw2"]}
PACKAGES = ["torch", "urllib3"]

Pair = tuple[torch.Tensor, int]


class Objects(Dataset[Pair]):
    """One object per sample."""

    def __init__(self, work: Work) -> None:
        self.work, self.objects = work, work.objects()
        self.pool: urllib3.PoolManager | None = None

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, index: int) -> Pair:
        self.pool = self.pool or urllib3.PoolManager()
        key, label = self.objects[index]
        answer = self.pool.request("GET", self.work.url(key))
        assert answer.status == 200, answer.status
        return self.work.apply(answer.data), label


class Local(Dataset[Pair]):
    """Samples out of their index."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.samples

    def __getitem__(self, index: int) -> Pair:
        return self.work.apply(index), self.work.label(index)


class Tars(IterableDataset[Pair]):
    """Each worker streams its share of the shards."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        assert worker
        pool = urllib3.PoolManager()
        for shard in self.work.shards()[worker.id :: worker.num_workers]:
            answer = pool.request("GET", self.work.url(shard), preload_content=False)
            assert answer.status == 200, answer.status
            with tarfile.open(fileobj=answer, mode="r|", bufsize=1 << 18) as tar:
                body = b""
                for member in tar:
                    file = tar.extractfile(member)
                    assert file
                    if member.name.endswith(".cls"):
                        yield self.work.apply(body), int(file.read())
                    else:
                        body = file.read()
            answer.release_conn()


def run(work: Work, parameters: Mapping[str, Any]) -> DataLoader[Pair]:
    """One epoch, shuffled where the data can be reached by index."""
    if work.kind == "tar":
        return DataLoader(Tars(work), batch_size=work.batch, collate_fn=collate, **parameters)
    dataset = Objects(work) if work.kind == "files" else Local(work)
    return DataLoader(dataset, batch_size=work.batch, shuffle=True, collate_fn=collate, **parameters)
