"""Workers' functions in economic mode, which read samples by key. Fast to import."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Subset

from headrace.torch_compat import worker_info
from headrace.torch_compat.serialize import pack_worker_error
from headrace.workers.failures import Origin, PackedError


def pack_in(kind: str, error: BaseException, origin: Origin, worker: int) -> PackedError:
    return pack_worker_error(error, f"in DataLoader worker {kind} {worker}", origin)


def getter(dataset: Any) -> Callable[[object], object]:
    """Return a function that reads a sample by key, without a Python frame in between."""
    return partial(operator.getitem, dataset)


def get_many(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """Return `__getitems__` of a data set, if it has one. torch's subsets only forward it."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return dataset.__getitems__ if getattr(inner, "__getitems__", None) else None


class Begin:
    """Initializes a worker as torch's workers do."""

    def __init__(
        self, dataset: object, count: int, base_seed: int, init: Callable[[int], object] | None, in_thread: bool
    ) -> None:
        self._dataset, self._count, self._base_seed = dataset, count, base_seed
        self._init, self._in_thread = init, in_thread

    @property
    def named(self) -> dict[str, object]:
        return {"dataset": self._dataset, "worker_init_fn": self._init}

    def __call__(self, number: int) -> None:
        if self._in_thread:
            worker_info.set_in_thread(number, self._count, self._base_seed, self._dataset)
        else:
            torch.set_num_threads(1)
            worker_info.set_in_process(number, self._count, self._base_seed, self._dataset)
        if self._init is not None:
            self._init(number)
