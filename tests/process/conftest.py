"""One fork server for all tests of this folder: it takes a second to start, its workers some milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.processes.fork_client import ForkServer


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer.acquire()
    yield fork_server
    fork_server.release()
