"""Worker identity as in torch: `torch.utils.data.get_worker_info()` and random seeds."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker


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
