"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Leaves
from end_to_end.economic import Loader, Make

import headrace as hr
from headrace.testing import FaultServer
from headrace.workers.forkserver.client import ForkServer


class _Nothing(hr.AsyncDataset):
    def __len__(self) -> int:
        return 1

    async def aget(self, key: int) -> int:
        return key


@pytest.fixture(scope="module")
def warm_server(leaves: Leaves) -> Iterator[None]:
    """The process that workers are forked from stays warm as long as any loader with workers lives."""
    with hr.DataLoader(_Nothing(), num_workers=1) as loader:
        leaves.allow(processes="headrace.workers.forkserver.server", reason="the fork server of the module's loader")
        yield
        assert loader.num_workers == 1


@pytest.fixture(scope="module")
def warm_workers(leaves: Leaves) -> Iterator[None]:
    fork_server = ForkServer.acquire()
    leaves.allow(processes="headrace.workers.forkserver.server", reason="the fork server of the module")
    yield
    fork_server.release()


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    """A web server without faults, unless an object is added with some."""
    with FaultServer() as running:
        yield running


@pytest.fixture
def economic() -> Iterator[Make]:
    """Makes loaders in economic mode, which are closed after the test."""
    made: list[Loader] = []

    def make(data: Any, **options: Any) -> Loader:
        made.append(Loader(data, **{"num_workers": 2, **options}))
        return made[-1]

    yield make
    while made:
        made.pop().economy.close()
