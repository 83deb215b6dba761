"""Tests of `loader_class` run with torch's loader, which proves them true, and with ours.

Where ours differs on purpose, a test uses our class alone.
"""

import warnings
from multiprocessing import resource_tracker

import pytest
import torch
from drop_in.classes import CLASSES, OURS


@pytest.fixture(params=CLASSES)
def loader_class(request: pytest.FixtureRequest) -> type[torch.utils.data.DataLoader]:
    """torch's DataLoader, then ours, with workers that are processes and with threads."""
    return request.param


@pytest.fixture(params=OURS)
def our_class(request: pytest.FixtureRequest) -> type[torch.utils.data.DataLoader]:
    """Ours, with workers that are processes and with threads: for what we do otherwise than torch."""
    return request.param


@pytest.fixture(autouse=True)
def no_warnings_about_this_machine() -> None:
    """Two workers may be more than a small machine has CPUs; and torch forks a process that may have threads."""
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)


@pytest.fixture(scope="session", autouse=True)
def python_keeps_its_resource_tracker() -> None:
    """Python starts it for the first context that is no fork, and has it until the interpreter ends."""
    resource_tracker.ensure_running()
