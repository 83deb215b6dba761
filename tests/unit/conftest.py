"""Unit tests start no process and reach no address: an audit hook refuses both."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

REFUSED = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "socket.bind", "socket.connect"}
_in_unit_test = False


def _refuse(event: str, _: object) -> None:
    if _in_unit_test and event in REFUSED:
        raise RuntimeError(f"{event} in a unit test: mark the test `process`, or put it into tests/process")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def _neither_process_nor_socket(request: pytest.FixtureRequest) -> Iterator[None]:
    global _in_unit_test
    _in_unit_test = request.node.get_closest_marker("process") is None
    yield
    _in_unit_test = False
