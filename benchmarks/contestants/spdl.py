"""Meta's SPDL: fetches with aiohttp on its loop, decodes in threads, all in the trainer's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import torch
from spdl.io import iter_tarfile
from spdl.pipeline import Pipeline, PipelineBuilder
from workloads import Read, Work, collate, tar_samples

from contestants import Batches

VARIANTS = {
    "c64": {"fetch": 64, "threads": 2},
    "c64-t4": {"fetch": 64, "threads": 4},
    "c256": {"fetch": 256, "threads": 2},
    "s4": {"fetch": 4, "threads": 4},
    "threads": {"threads": 2},
}
WORKLOADS = {
    "W1": ["c64", "c64-t4"],
    "W2": ["s4"],
    "W3": ["c64", "c256"],
    "W3s": ["c256"],
    "W4": ["s4"],
    "W5": ["threads"],
}
WORKLOADS |= {name: ["c64"] for name in ("W1b", "W1t", "W6", "W6n")}
PACKAGES = ["spdl", "aiohttp"]

Pair = tuple[torch.Tensor, int]


class Fetch:
    """A read to (bytes, label); the session is opened on the pipeline's own loop."""

    def __init__(self, work: Work, connections: int) -> None:
        self.work, self.connections = work, connections
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, read: Read) -> tuple[bytes, int]:
        if self.session is None:
            connector = aiohttp.TCPConnector(limit=self.connections)
            self.session = aiohttp.ClientSession(connector=connector, raise_for_status=True)
        async with self.session.get(self.work.url(read.key), headers=read.headers) as answer:
            return await answer.read(), read.label


class Shards:
    """A shard in memory to lists of samples, a batch each, so that the queues carry few entries."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, shard: tuple[bytes, int]) -> Iterator[list[Pair]]:
        samples: list[Pair] = []
        for body, label in tar_samples(iter_tarfile(shard[0])):
            samples.append((self.work.apply(body), label))
            if len(samples) == self.work.batch:
                yield samples
                samples = []
        if samples:
            yield samples


class Apply:
    """(bytes or index, label) to a sample."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, pair: tuple[Any, int]) -> Pair:
        return self.work.apply(pair[0]), pair[1]


def run(work: Work, parameters: Mapping[str, Any]) -> Batches:
    """One epoch, in the order in which things get ready."""
    builder: Any = PipelineBuilder()
    threads = parameters["threads"]
    if work.kind == "tar":
        builder.add_source([Read(shard, 0, None, 0) for shard in work.shards()])
        builder.pipe(Fetch(work, 64), concurrency=parameters["fetch"])
        builder.pipe(Shards(work), concurrency=threads)
    elif work.kind == "local":
        builder.add_source([(index, work.label(index)) for index in range(work.samples)])
        builder.pipe(Apply(work), concurrency=threads).aggregate(work.batch)
    else:
        builder.add_source(work.drawn_reads())
        builder.pipe(Fetch(work, parameters["fetch"]), concurrency=parameters["fetch"])
        builder.pipe(Apply(work), concurrency=threads).aggregate(work.batch)
    return _stopped_at_the_end(builder.pipe(collate).add_sink(4).build(num_threads=threads + 1))


def _stopped_at_the_end(pipeline: Pipeline[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    with pipeline.auto_stop():
        yield from pipeline
