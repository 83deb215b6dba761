"""Fixtures of the tests of states: a server on loopback, and small windows."""

from collections.abc import Iterator

import pytest
from conftest import Leaves
from end_to_end.state.sources import Places

from headrace.testing import FaultServer


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, leaves: Leaves) -> Iterator[Places]:
    with FaultServer() as server:
        port = server.url.rpartition(":")[2]
        for address in (f"tcp 127.0.0.1:{port} ", f"-> 127.0.0.1:{port}$"):
            leaves.allow(descriptors=address, reason="the server of the module, and its connections")
        yield Places(server, tmp_path_factory.mktemp("samples"))


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few samples have several lanes, and an epoch several windows."""
    monkeypatch.setattr("headrace.pipeline.epoch_orders._STRETCH_SAMPLES", 2)
    monkeypatch.setattr("headrace.ops.combined._WINDOW_SAMPLES", 8)
