"""The fork server that tests share, for those that look at it."""

from collections.abc import Iterator

import pytest

from headrace.workers.forkserver.client import ForkServer


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer.acquire()
    yield fork_server
    fork_server.release()
