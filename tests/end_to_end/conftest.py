"""Fixtures of the end-to-end tests."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Leaves

from headrace.fetch.stores import memory
from headrace.testing import FaultServer
from headrace.workers.forkserver.client import ForkServer


@pytest.fixture(scope="module")
def warm_server(leaves: Leaves) -> Iterator[None]:
    """The process that workers are forked from, kept between the tests of a module."""
    fork_server = ForkServer.acquire()
    leaves.allow(processes="headrace.workers.forkserver.server", reason="the fork server of the module")
    yield
    fork_server.release()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of the test's caches."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def put() -> Iterator[Callable[..., None]]:
    """Puts objects at memory://place/, which are removed after the test."""
    written: list[str] = []

    def put(path: str, data: bytes = b"x") -> None:
        memory.put(f"memory://place/{path}", data)
        written.append(path)

    yield put
    for path in written:
        memory.remove(f"memory://place/{path}")


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    """A web server without faults, unless an object is added with some."""
    with FaultServer() as running:
        yield running
