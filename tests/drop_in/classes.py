"""The loader classes that tests compare."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch

import headrace as hr

T = TypeVar("T")


class ThreadLoader(hr.DataLoader[T]):
    """Ours, its workers threads."""

    def __init__(self, *args: Any, workers: str = "thread", **options: Any) -> None:
        super().__init__(*args, workers=workers, **options)


# Two workers may be more than a small machine has CPUs; and torch forks a process that may have threads by then.
_QUIET = (
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
)

# Workers of torch that are terminated leave the folder of a socket in the temporary folder.
_LEAVES = pytest.mark.may_leave(files="^pymp-", reason="torch's workers were terminated")

_TORCHS = pytest.param(torch.utils.data.DataLoader, id="torch", marks=(*_QUIET, _LEAVES))
_PROCESSES, _THREADS = (
    pytest.param(kind, id=name, marks=_QUIET) for name, kind in {"ours": hr.DataLoader, "threads": ThreadLoader}.items()
)
CLASSES = [_TORCHS, _PROCESSES, _THREADS]
OURS = [_PROCESSES, _THREADS]

# For what is true of workers that are processes only: they have an id, a copy of the data set, and seeds of their own.
in_processes = pytest.mark.parametrize("loader_class", [_TORCHS, _PROCESSES])


def caught(loader_class: type[Any], error: str, worker: int) -> str:
    kind = "thread" if issubclass(loader_class, ThreadLoader) else "process"
    return f"Caught {error} in DataLoader worker {kind} {worker}.\nOriginal Traceback (most recent call last):\n"
