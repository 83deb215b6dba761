"""Where the workers of a loader of torch's data sets come from, and what is done where something cannot be carried."""

from __future__ import annotations

import multiprocessing
import sys
import warnings

import torch

from headrace import descriptors
from headrace.drop_in.torch_loader import TorchLoader
from headrace.drop_in.workers.forked import ForkServerStarter
from headrace.drop_in.workers.messages import WorkerConfig
from headrace.drop_in.workers.of_context import ContextStarter
from headrace.drop_in.workers.starter import WorkerStarter
from headrace.drop_in.workers.threads import ThreadStarter
from headrace.errors import CannotCarryError, CannotCarryWarning


class Starting:
    """Gives the starters of one loader. What cannot be carried is inherited, where torch's loader would fork anyhow.

    Once it has come to that, the loader goes on so: what a data set has opened it will have open in the next epoch.
    """

    def __init__(self) -> None:
        self._forks = False

    def starter(self, loader: TorchLoader[object], config: WorkerConfig) -> WorkerStarter:
        """What starts the workers of one iterator.

        Raises:
            CannotCarryError: something in the job cannot be sent to another process, and there is to be no fork.
            OptionError: this process cannot open as many files as so many workers take.
        """
        if loader.workers == "thread":
            return ThreadStarter(config)
        descriptors.require(loader.num_workers, reads=False)
        if loader.multiprocessing_context is not None:
            return ContextStarter(loader.multiprocessing_context, config)
        if not self._forks:
            try:
                return ForkServerStarter(config)
            except CannotCarryError as error:
                if loader.fallback == "error" or not _torch_would_fork():
                    raise
                self._forks = True
                _warn(error)
        return ContextStarter(multiprocessing.get_context("fork"), config)


def _torch_would_fork() -> bool:
    """Whether fork is how processes are started here; without making that so from now on."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return (chosen or multiprocessing.get_all_start_methods()[0]) == "fork"


def _warn(error: CannotCarryError) -> None:
    text = (
        f"{error.what}. So the workers of this loader are forked from this process, as torch's are: they have copies "
        "of its locks as they stand, and share the positions of its open files. Open such things in the worker, when "
        'they are first used, to have none of that; fallback="error" makes this an error.'
    )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        text += " CUDA has been initialised here, and cannot be used in a fork."
    warnings.warn(text, CannotCarryWarning, stacklevel=_stacklevel())


def _stacklevel() -> int:
    """Of the user's own line, as `warnings.warn` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("headrace.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
