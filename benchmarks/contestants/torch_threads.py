"""torch's DataLoader with a data set that makes a batch's blocking GETs, and its samples, in a pool of threads."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader
from workloads import Work

from contestants import torch_dl
from contestants.torch_dl import Pair

VARIANTS = {"nw2-t64": {"num_workers": 2, "threads": 64}, "nw8-t16": {"num_workers": 8, "threads": 16}}
WORKLOADS = {name: ["nw2-t64"] for name in ("W1", "W1b", "W1t", "W3")}
WORKLOADS |= {name: ["nw8-t16"] for name in ("W3s", "W6", "W6n")}
PACKAGES = ["torch", "urllib3"]


class Objects(torch_dl.Objects):
    """A batch at a time."""

    def __init__(self, work: Work, threads: int) -> None:
        super().__init__(work)
        self.threads = threads

    @cached_property
    def executor(self) -> ThreadPoolExecutor:
        """The threads of this process."""
        return ThreadPoolExecutor(self.threads)

    def __getitems__(self, indices: list[int]) -> list[Pair]:
        return list(self.executor.map(self.__getitem__, indices))


def run(work: Work, parameters: Mapping[str, Any]) -> DataLoader[Pair]:
    """One epoch."""
    dataset = Objects(work, parameters["threads"])
    return torch_dl.loader(dataset, work, {"num_workers": parameters["num_workers"]})
