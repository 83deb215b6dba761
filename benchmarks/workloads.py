"""The workloads: what is to be read, and what every contestant turns it into, by the same functions."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from data import ARRAYS_PER_SHARD, DATA, IMAGES_PER_SHARD, LARGE_SAMPLE_BYTES, label
from PIL import Image

SAMPLES_PER_SHARD = {"wds": IMAGES_PER_SHARD, "small": ARRAYS_PER_SHARD}


@dataclass(frozen=True)
class Work:
    """One epoch of one kind of data.

    Attributes:
        kind: `files` (an object per sample), `tar` (shards) or `local` (no storage: the index is the sample).
        bucket: the folder of the data directory.
        field: what the samples' bytes are called in a shard.
        delay_ms: what the server waits before the first byte of each answer.
        batch: samples in a batch.
        samples: samples in the epoch.
        apply: the samples' bytes (or index) to a tensor.
    """

    name: str
    about: str
    kind: Literal["files", "tar", "local"]
    bucket: str
    field: str
    delay_ms: int
    batch: int
    samples: int
    apply: Callable[[Any], torch.Tensor]

    def url(self, key: str) -> str:
        """Where the object `key` is served; the benchmark that runs us has said where its server is."""
        return f"{os.environ['HEADRACE_BENCH_SERVER']}/d{self.delay_ms}/{self.bucket}/{key}"

    def objects(self) -> list[tuple[str, int]]:
        """Key and label of each object of a `files` workload."""
        return [(f"{i:05d}.{self.field}", label(i)) for i in range(self.samples)]

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
            return sum((DATA / f"images/{i:05d}.jpg").stat().st_size for i in range(self.samples))
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
    """The first 64 KiB of a body: [65536] uint8."""
    return torch.from_numpy(np.frombuffer(body, np.uint8, 65536).copy())


W1 = Work("W1", "loose JPEGs over HTTP, 20 ms, shuffled, decoded", "files", "images", "jpg", 20, 64, 2000, decode)
W2 = Work("W2", "tar shards of JPEGs over HTTP, 20 ms, decoded", "tar", "wds", "jpg", 20, 64, 2048, decode)
W4 = Work("W4", "tar shards of 1.6 KB arrays over HTTP, 5 ms", "tar", "small", "npy", 5, 512, 80_000, array)
W5 = Work("W5", "in memory, float32 3x224x224: transport only", "local", "", "", 0, 64, 6400, fill)
WORKLOADS = {work.name: work for work in (W1, W2, W4, W5)}


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
