"""torch's DataLoader with a data set that makes a batch's GETs at once by aiohttp.

Each worker keeps its loop and its connections for the epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import aiohttp
from torch.utils.data import DataLoader
from workloads import Read, Work

from contestants import torch_dl
from contestants.torch_dl import Pair

VARIANTS = {f"nw{n}": {"num_workers": n} for n in (2, 8)}
WORKLOADS = {name: ["nw2"] for name in ("W1", "W1b", "W1t", "W6", "W6n")} | {"W3": ["nw2", "nw8"], "W3s": ["nw8"]}
PACKAGES = ["torch", "aiohttp"]


class Objects(torch_dl.Objects):
    """A batch at a time."""

    @cached_property
    def runner(self) -> asyncio.Runner:
        """The loop of this process."""
        return asyncio.Runner()

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """The connections of this process; made on its loop."""
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=128), raise_for_status=True)

    async def get(self, read: Read) -> bytes:
        """One sample's bytes."""
        async with self.session.get(self.work.url(read.key), headers=read.headers) as answer:
            return await answer.read()

    async def get_all(self, reads: list[Read]) -> list[bytes]:
        """All of a batch's."""
        return await asyncio.gather(*map(self.get, reads))

    def __getitems__(self, indices: list[int]) -> list[Pair]:
        reads = [self.reads[index] for index in indices]
        bodies = self.runner.run(self.get_all(reads))
        return [(self.work.apply(body), read.label) for body, read in zip(bodies, reads, strict=True)]


def run(work: Work, parameters: Mapping[str, Any]) -> DataLoader[Pair]:
    """One epoch."""
    return torch_dl.loader(Objects(work), work, parameters)
