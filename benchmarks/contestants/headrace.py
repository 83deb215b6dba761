"""headrace: streams of shards (W2, W4), shards by number (W2r), async data sets (all others), torch's collate.

"nw2" has two worker processes, and is measured with headrace's fork server ready: it imports torch once per trainer
(about a second), as the other contestants' imports are not timed either. "nw2-cold" has that second in it. "nw0" does
all in the trainer's process. "-own" turns bytes into tensors by headrace's own decoders, and not by the function that
all contestants share. "-c256" has that many reads in flight, and batches enough ahead for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads import Work

import headrace as hr
import headrace.fetch.reader
import headrace.fetch.web.client  # as others import their clients
from contestants.headrace_sample import Sample
from headrace.cli import main as command

VARIANTS: dict[str, dict[str, Any]] = {f"nw{n}": {"num_workers": n} for n in (0, 2)}
VARIANTS["nw2-cold"] = {"num_workers": 2, "cold": True}
VARIANTS["nw2-own"] = {"num_workers": 2, "own": True}
VARIANTS |= {
    f"nw{n}-c{reads}": {"num_workers": n, "fetch": hr.Fetch(concurrency=reads), "prefetch_factor": reads // 32}
    for n in (0, 2)
    for reads in (256, 512)
}
WORKLOADS = {name: ["nw2", "nw2-cold"] for name in ("W1", "W2", "W4", "W5")}
WORKLOADS["W2"] += ["nw2-own"]
WORKLOADS["W4"] += ["nw2-own"]
WORKLOADS |= {"W2r": ["nw2"], "W1b": ["nw2"], "W1t": ["nw2"], "W6": ["nw0", "nw2"], "W6n": ["nw0", "nw2"]}
WORKLOADS |= {"W3": ["nw0", "nw2", "nw0-c256", "nw2-c256"], "W3s": ["nw0", "nw2", "nw0-c512", "nw2-c512"]}
PACKAGES = ["headrace", "torch", "obstore"]

WARM: list[hr.DataLoader[Any]] = []
"""A loader that has done an epoch and stays alive, so that the fork server is there."""


class Indices(hr.AsyncDataset):
    """The index is the sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    async def aget(self, index: int) -> int:
        return index


class Objects(hr.AsyncDataset):
    """One object, or one range of it, per sample: (bytes, label)."""

    def __init__(self, work: Work, part: slice = slice(None)) -> None:
        self.work, self.reads = work, work.reads()[part]

    def __len__(self) -> int:
        return len(self.reads)

    async def aget(self, index: int) -> tuple[bytes, int]:
        key, start, stop, label = self.reads[index]
        return await hr.read(self.work.url(key), None if stop is None else start, stop), label


def warm_up(workers: int = 1) -> hr.DataLoader[Any]:
    """A loader that has done one small epoch: all is imported, and a fork server forks workers in milliseconds."""
    loader: hr.DataLoader[Any] = hr.DataLoader(Indices(4 * max(1, workers)), batch_size=4, num_workers=workers)
    for _ in loader:
        pass
    return loader


def prepare(work: Work, parameters: Mapping[str, Any]) -> None:
    """Import all, make an index where one is used, and start the fork server, unless that is to be measured."""
    if work.by_number:
        arguments = ["index", *(work.url(shard) for shard in work.shards()), "--output", _index_file(work), "--quiet"]
        assert command(arguments) == 0
    if not parameters.get("cold"):
        WARM.append(warm_up(min(1, parameters["num_workers"])))


def run(work: Work, parameters: Mapping[str, Any]) -> hr.DataLoader[Any]:
    """One epoch: loose objects shuffled, shards in their order."""
    dataset: Any
    if work.kind == "tar":
        dataset = hr.stream(
            [work.url(shard) for shard in work.shards()], index=_index_file(work) if work.by_number else None
        )
        if work.by_number:
            dataset = dataset.shuffle("global")
    else:
        dataset = Indices(work.samples) if work.kind == "local" else Objects(work)
    options = {name: value for name, value in parameters.items() if name not in ("cold", "own")}
    if work.kind == "files":
        options["shuffle"] = True
    if parameters.get("own"):
        decoded = dataset.decode("rgb8", size=(224, 224)) if work.field == "jpg" else dataset.decode()
        return hr.DataLoader(decoded.to_tuple(work.field, "cls"), batch_size=work.batch, **options)
    return hr.DataLoader(dataset.map(Sample(work), random=False), batch_size=work.batch, **options)


def _index_file(work: Work) -> str:
    return str(Path(tempfile.gettempdir()) / f"headrace-bench-{work.bucket}-{work.delay}.hri")
