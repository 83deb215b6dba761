"""Choice of the workers' start method: a fork of this process wherever torch's loader forks."""

from __future__ import annotations

import multiprocessing

from headrace import descriptors
from headrace.drop_in.workers.forked import ForkServerStarter
from headrace.drop_in.workers.messages import WorkerConfig
from headrace.drop_in.workers.of_context import ContextStarter
from headrace.drop_in.workers.starter import WorkerStarter
from headrace.drop_in.workers.threads import ThreadStarter
from headrace.torch_compat.torch_loader import TorchLoader


def starter(loader: TorchLoader[object], config: WorkerConfig) -> WorkerStarter:
    """Return the starter of an iterator's workers.

    Where processes are not forked by default (Python 3.14, macOS), headrace's fork server forks them. Unlike the
    standard library's, it accepts lambdas, and scripts without a main guard.

    Raises:
        CannotCarryError: a part of the job cannot be sent to the fork server's workers.
        OptionError: this process cannot open as many files as the workers need.
    """
    if loader.workers == "thread":
        return ThreadStarter(config)
    descriptors.require(loader.num_workers, reads=False)
    if has_fork_server(loader):
        return ForkServerStarter(config)
    return ContextStarter(loader.multiprocessing_context or multiprocessing, config)


def has_fork_server(loader: TorchLoader[object]) -> bool:
    """True if headrace's fork server starts workers. Leaves multiprocessing's start method open."""
    if loader.workers == "thread" or loader.multiprocessing_context is not None:
        return False
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) != "fork"
