"""What torch's loader does for data sets that are its DataPipes."""

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
"""Torch finds the parts of a pipe by a hook of its class while it pickles it: one thread at a time can."""


def is_pipe(dataset: object) -> bool:
    """Whether a data set is one; each worker, and each thread, has a copy of its own to shard."""
    return isinstance(dataset, IterDataPipe | MapDataPipe)


def is_iterated_pipe(dataset: object) -> TypeGuard[IterDataPipe[object]]:
    """Whether a data set is one that draws random numbers from a seed of its own."""
    return isinstance(dataset, IterDataPipe)


def seeded(dataset: object, shared_seed: int | None) -> Any:
    """A data set, with pipes that draw from a seed which all workers share, if it is one that is iterated over."""
    if not is_iterated_pipe(dataset):
        return dataset
    generator = torch.Generator()
    generator.manual_seed(shared_seed or 0)
    with traversing:
        return apply_random_seed(dataset, generator)


def with_sharding(
    init_fn: Callable[[int], object] | None, dataset: object, world_size: int, rank: int
) -> Callable[[int], object] | None:
    """A `worker_init_fn` that has each worker of each rank read its share of a pipe, too."""
    return functools.partial(_shard, init_fn, world_size, rank) if is_pipe(dataset) else init_fn


def _shard(init_fn: Callable[[int], object] | None, world_size: int, rank: int, number: int) -> None:
    with traversing:
        _sharding_worker_init_fn(None, world_size, rank, number)
    if init_fn is not None:
        init_fn(number)
