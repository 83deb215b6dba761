"""The workloads: what is to be read, and what every contestant turns it into, by the same functions."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from data import ARRAYS_PER_SHARD, DATA, IMAGES, IMAGES_PER_SHARD, LARGE_SAMPLE_BYTES, TOKENS, label
from PIL import Image

SAMPLES_PER_SHARD = {"wds": IMAGES_PER_SHARD, "small": ARRAYS_PER_SHARD}
WINDOW_BYTES = 4096


class Read(NamedTuple):
    """One sample's bytes: [start, stop) of the object `key`, all of it where `stop` is None."""

    key: str
    start: int
    stop: int | None
    label: int

    @property
    def headers(self) -> dict[str, str]:
        """What says so in HTTP."""
        return {} if self.stop is None else {"Range": f"bytes={self.start}-{self.stop - 1}"}


@dataclass(frozen=True)
class Work:
    """One epoch of one kind of data.

    Attributes:
        kind: `files` (an object per sample), `windows` (a range of one object per sample), `tar` (shards) or `local`
            (no storage: the index is the sample).
        bucket: the folder of the data directory.
        field: what the samples' bytes are called in a shard.
        delay: what the server waits before the first byte of each answer, by the names of server.lua.
        batch: samples in a batch.
        samples: samples in the epoch.
        apply: the samples' bytes (or index) to a tensor.
        neighbours: `windows` that touch, in their order; else they lie anywhere.
        base: the workload beside which the rates of this one are put.
    by_number: the samples of `tar` in any order, each got by itself.
    """

    name: str
    about: str
    kind: Literal["files", "windows", "tar", "local"]
    bucket: str
    field: str
    delay: str
    batch: int
    samples: int
    apply: Callable[[Any], torch.Tensor]
    neighbours: bool = False
    base: str = ""
    by_number: bool = False

    def scaled(self, scale: float) -> Self:
        """The same with so many times the samples; whole shards, and no more than there are."""
        unit = SAMPLES_PER_SHARD.get(self.bucket, 1)
        samples = max(1, round(scale * self.samples / unit)) * unit
        return replace(self, samples=min(samples, self.samples) if self.kind == "tar" else samples)

    def url(self, key: str) -> str:
        """Where the object `key` is served; the benchmark that runs us has said where its server is."""
        return f"{os.environ['HEADRACE_BENCH_SERVER']}/{self.delay}/{self.bucket}/{key}"

    def reads(self) -> list[Read]:
        """What the samples of `files` and `windows` are read from; of more samples than images the images repeat."""
        if self.kind == "windows":
            return [Read("tokens.u16", start, start + WINDOW_BYTES, label(i)) for i, start in enumerate(self._starts())]
        return [Read(f"{i % IMAGES:05d}.{self.field}", 0, None, label(i)) for i in range(self.samples)]

    def drawn_reads(self) -> list[Read]:
        """The reads, in an order in which somebody makes them who does not shuffle himself."""
        reads = self.reads()
        if self.kind == "files":
            random.Random(1).shuffle(reads)
        return reads

    def _starts(self) -> Iterable[int]:
        if self.neighbours:
            return range(0, WINDOW_BYTES * self.samples, WINDOW_BYTES)
        places = random.Random(5)
        return (2 * places.randrange(TOKENS - WINDOW_BYTES // 2) for _ in range(self.samples))

    def shards(self) -> list[str]:
        """Keys of the shards of a `tar` workload."""
        if self.bucket == "large":
            return [f"{self.samples:05d}.tar"]
        return [f"{k:05d}.tar" for k in range(self.samples // SAMPLES_PER_SHARD[self.bucket])]

    def label(self, index: int) -> int:
        """The label of sample `index`."""
        return index % 1000 if self.kind == "local" else label(index)

    def label_sum(self) -> int:
        """What the labels of a right epoch add up to."""
        return sum(map(self.label, range(self.samples)))

    def payload_bytes(self) -> int:
        """Bytes of the samples themselves, as they are stored; for `local`, as they are delivered."""
        if self.kind == "local":
            return self.samples * 3 * 224 * 224 * 4
        if self.field == "jpg":
            return sum((DATA / f"images/{i % IMAGES:05d}.jpg").stat().st_size for i in range(self.samples))
        if self.kind == "windows":
            return self.samples * WINDOW_BYTES
        return self.samples * (LARGE_SAMPLE_BYTES if self.bucket == "large" else 1664)


def decode(body: bytes) -> torch.Tensor:
    """A JPEG: [224, 224, 3] uint8."""
    image = Image.open(io.BytesIO(body))
    image.draft("RGB", (224, 224))
    return torch.from_numpy(np.array(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)))


def array(body: bytes) -> torch.Tensor:
    """A .npy body: [384] float32."""
    return torch.from_numpy(np.load(io.BytesIO(body)))


def fill(index: int) -> torch.Tensor:
    """[3, 224, 224] float32, all `index`."""
    return torch.empty(3, 224, 224).fill_(index)


def crop(body: bytes) -> torch.Tensor:
    """The first 32 KiB of a body: [32768] uint8."""
    return torch.from_numpy(np.frombuffer(body, np.uint8, 32768).copy())


def tokens(body: bytes) -> torch.Tensor:
    """A window of tokens: [2048] int64."""
    return torch.from_numpy(np.frombuffer(body, np.uint16).astype(np.int64))


W1 = Work("W1", "loose JPEGs over HTTP, 20 ms, shuffled, decoded", "files", "images", "jpg", "d20", 64, 2000, decode)
W1b = replace(W1, name="W1b", about="W1 at 10 ms", delay="d10")
W1t = replace(W1, name="W1t", about="W1 at 10 ms, and 2 % of the answers after 400 ms", delay="tail", base="W1b")
W2 = Work("W2", "tar shards of JPEGs over HTTP, 20 ms, decoded", "tar", "wds", "jpg", "d20", 64, 2048, decode)
W2r = replace(W2, name="W2r", about="W2's samples one by one, shuffled globally", base="W1", by_number=True)
W3 = replace(W1, name="W3", about="loose objects of 83 KB over HTTP, 20 ms, shuffled, not decoded", apply=crop)
W3s = replace(W3, name="W3s", about="W3 at 100 ms", delay="d100")
W4 = Work("W4", "tar shards of 1.6 KB arrays over HTTP, 5 ms", "tar", "small", "npy", "d5", 512, 80_000, array)
W5 = Work("W5", "in memory, float32 3x224x224: transport only", "local", "", "", "", 64, 6400, fill)
W6 = Work("W6", "4 KiB windows anywhere in 512 MiB of tokens, 5 ms", "windows", "tokens", "u16", "d5", 32, 4096, tokens)
W6n = replace(W6, name="W6n", about="W6 with windows that touch, in their order", neighbours=True, base="W6")
WORKLOADS = {work.name: work for work in (W1, W1b, W1t, W2, W2r, W3, W3s, W4, W5, W6, W6n)}


def collate(samples: Iterable[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples to a batch, for contestants that do not bring their own: stacked tensors, int64 labels."""
    tensors, labels = zip(*samples, strict=True)
    return torch.stack(tensors), torch.tensor(labels)


def tar_samples(members: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, int]]:
    """(name, bytes) in tar order to (body, label); the label's member follows its sample's."""
    body: Any = b""
    for name, content in members:
        if name.endswith(".cls"):
            yield body, int(bytes(content))
        else:
            body = content
