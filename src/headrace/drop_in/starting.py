"""Where the workers of torch's data sets come from: a fork of this process, wherever torch's loader forks."""

from __future__ import annotations

import multiprocessing

from headrace import descriptors
from headrace.drop_in.torch_loader import TorchLoader
from headrace.drop_in.workers.forked import ForkServerStarter
from headrace.drop_in.workers.messages import WorkerConfig
from headrace.drop_in.workers.of_context import ContextStarter
from headrace.drop_in.workers.starter import WorkerStarter
from headrace.drop_in.workers.threads import ThreadStarter


def starter(loader: TorchLoader[object], config: WorkerConfig) -> WorkerStarter:
    """What starts the workers of one iterator.

    Where processes are not forked by default (Python 3.14, macOS), a fork server of ours forks them: unlike the
    standard library's, it takes lambdas, and scripts without a main guard.

    Raises:
        CannotCarryError: something in the job cannot be sent to the fork server's workers.
        OptionError: this process cannot open as many files as so many workers take.
    """
    if loader.workers == "thread":
        return ThreadStarter(config)
    descriptors.require(loader.num_workers, reads=False)
    if has_fork_server(loader):
        return ForkServerStarter(config)
    return ContextStarter(loader.multiprocessing_context or multiprocessing, config)


def has_fork_server(loader: TorchLoader[object]) -> bool:
    """Whether a fork server of ours has the worker processes. Asking does not settle how this process starts others."""
    if loader.workers == "thread" or loader.multiprocessing_context is not None:
        return False
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) != "fork"
