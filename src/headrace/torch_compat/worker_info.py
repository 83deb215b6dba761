"""Identity, random seeds and share of a DataPipe that a worker has in torch."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _sharding_worker_init_fn
from torch.utils.data.graph_settings import apply_random_seed


class _OfThread(threading.local):
    info: torch_worker.WorkerInfo | None = None


_of_thread = _OfThread()


def set_in_process(number: int, count: int, base_seed: int, dataset: Any) -> None:
    """Make this process worker `number` of `count`: seeds, and the result of `get_worker_info`."""
    seed = base_seed + number
    random.seed(seed)
    torch.manual_seed(seed)
    words = torch_worker._generate_state(base_seed, number)  # type: ignore[no-untyped-call]
    np.random.seed(words)  # noqa: NPY002 (users' functions draw from it)
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)


def warm_up() -> None:
    """Load the modules that seeding needs, which saves each forked process some 25 ms."""
    set_in_process(0, 1, 0, None)
    torch_worker._worker_info = None


def set_in_thread(number: int, count: int, base_seed: int, dataset: Any) -> None:
    """Make this thread worker `number` of `count`. Random generators belong to the process.

    torch stores the result of `get_worker_info` once per process, and data sets have imported that function. So the
    function's code is replaced, to look at the thread first.
    """
    body = _get_worker_info.__code__
    if get_worker_info.__code__ is not body:
        vars(torch_worker)["_headrace_of_thread"] = _of_thread
        get_worker_info.__code__ = body
    _of_thread.info = torch_worker.WorkerInfo(
        id=number, num_workers=count, seed=base_seed + number, dataset=dataset, worker_method="thread"
    )


def _get_worker_info() -> object:
    return _headrace_of_thread.info or _worker_info  # type: ignore[name-defined]  # noqa: F821 (names in the module of torch)


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
