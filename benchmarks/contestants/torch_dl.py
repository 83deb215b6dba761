"""torch's DataLoader as most people use it: one blocking GET per sample, or a tar stream per worker."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import urllib3
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from workloads import Work, collate

VARIANTS = {f"nw{n}": {"num_workers": n} for n in (2, 8, 32)} | {"nw32-pf8": {"num_workers": 32, "prefetch_factor": 8}}
WORKLOADS = {"W1": ["nw8", "nw32"], "W2": ["nw2"], "W4": ["nw2"], "W5": ["nw2"]}
WORKLOADS |= {name: ["nw32"] for name in ("W1b", "W1t", "W3", "W6", "W6n")} | {"W3s": ["nw32-pf8"]}
PACKAGES = ["torch", "urllib3"]

Pair = tuple[torch.Tensor, int]


class Objects(Dataset[Pair]):
    """One object, or one range of it, per sample."""

    def __init__(self, work: Work) -> None:
        self.work, self.reads = work, work.reads()

    @cached_property
    def pool(self) -> urllib3.PoolManager:
        """Connections of this process, for as many threads as there may be."""
        return urllib3.PoolManager(maxsize=64)

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> Pair:
        read = self.reads[index]
        answer = self.pool.request("GET", self.work.url(read.key), headers=read.headers)
        assert answer.status in {200, 206}, answer.status
        return self.work.apply(answer.data), read.label


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


def loader(dataset: Dataset[Pair], work: Work, parameters: Mapping[str, Any]) -> DataLoader[Pair]:
    """One epoch; objects come shuffled, windows in the workload's order."""
    shuffle = work.kind in {"files", "local"}
    return DataLoader(dataset, batch_size=work.batch, shuffle=shuffle, collate_fn=collate, **parameters)


def run(work: Work, parameters: Mapping[str, Any]) -> DataLoader[Pair]:
    """One epoch."""
    kinds: dict[str, Callable[[Work], Dataset[Pair]]] = {"tar": Tars, "local": Local}
    return loader(kinds.get(work.kind, Objects)(work), work, parameters)
