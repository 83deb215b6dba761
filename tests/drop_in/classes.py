"""The loader classes that tests compare."""

from typing import Any, TypeVar

import pytest
import torch

import headrace as hr

T = TypeVar("T")


class ThreadLoader(hr.DataLoader[T]):
    def __init__(self, *args: Any, workers: str = "thread", **options: Any) -> None:
        super().__init__(*args, workers=workers, **options)


# Workers of torch that are terminated leave the folder of a socket in the temporary folder.
_LEAVES = pytest.mark.may_leave(files="^pymp-", reason="torch's workers were terminated")

_TORCHS = pytest.param(torch.utils.data.DataLoader, id="torch", marks=_LEAVES)
_PROCESSES, _THREADS = pytest.param(hr.DataLoader, id="ours"), pytest.param(ThreadLoader, id="threads")
CLASSES = [_TORCHS, _PROCESSES, _THREADS]
OURS = [_PROCESSES, _THREADS]

# For what is true of workers that are processes only: they have an id, a copy of the data set, and seeds of their own.
in_processes = pytest.mark.parametrize("loader_class", [_TORCHS, _PROCESSES])


def caught(loader_class: type[Any], error: str, worker: int) -> str:
    kind = "thread" if issubclass(loader_class, ThreadLoader) else "process"
    return f"Caught {error} in DataLoader worker {kind} {worker}.\nOriginal Traceback (most recent call last):\n"


# A script that makes such a loader begins with these lines.
PREAMBLE = """
import multiprocessing, os, sys, threading, warnings
warnings.filterwarnings("ignore", "This DataLoader will create")
import torch
from torch.utils.data import Dataset

"""
IMPORTS = {
    torch.utils.data.DataLoader: "from torch.utils.data import DataLoader\n",
    hr.DataLoader: "from headrace import DataLoader\n",
    ThreadLoader: "import functools, headrace\nDataLoader = functools.partial(headrace.DataLoader, workers='thread')\n",
}
