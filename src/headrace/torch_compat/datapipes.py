"""Support for torch's DataPipes, as in torch's loader."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _sharding_worker_init_fn
from torch.utils.data.graph_settings import apply_random_seed

traversing = threading.Lock()
os.register_at_fork(before=traversing.acquire, after_in_parent=traversing.release, after_in_child=traversing.release)
"""torch traverses a pipe by pickling it with a hook of its class, which only one thread at a time can use."""


def is_pipe(dataset: object) -> bool:
    """True for a DataPipe. Each worker and each thread shards its own copy."""
    return isinstance(dataset, IterDataPipe | MapDataPipe)


def is_iterated_pipe(dataset: object) -> TypeGuard[IterDataPipe[object]]:
    """True for a DataPipe that draws random numbers from its own seed."""
    return isinstance(dataset, IterDataPipe)


def seeded(dataset: object, shared_seed: int | None) -> Any:
    if not is_iterated_pipe(dataset):
        return dataset
    generator = torch.Generator()
    generator.manual_seed(shared_seed or 0)
    with traversing:
        return apply_random_seed(dataset, generator)


def with_sharding(
    init_fn: Callable[[int], object] | None, dataset: object, world_size: int, rank: int
) -> Callable[[int], object] | None:
    """Return a `worker_init_fn` that also selects this worker's and rank's share of a DataPipe."""
    return functools.partial(_shard, init_fn, world_size, rank) if is_pipe(dataset) else init_fn


def _shard(init_fn: Callable[[int], object] | None, world_size: int, rank: int, number: int) -> None:
    with traversing:
        _sharding_worker_init_fn(None, world_size, rank, number)
    if init_fn is not None:
        init_fn(number)
