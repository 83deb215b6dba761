"""A loader's running parts, closed at the moment in which they start."""

from __future__ import annotations

import threading

import pytest

from headrace.errors import LoaderClosedError
from headrace.observe.stats import LoaderMeters
from headrace.options import FetchOptions, Settings
from headrace.session.runtime import Runtime

SETTINGS = Settings(
    batch_size=1,
    drop_last=False,
    num_workers=0,
    prefetch_factor=1,
    collate=None,
    use_slots=False,
    init=None,
    seed=0,
    in_order=True,
    timeout_s=0,
    fetch_concurrency=1,
    first_reads=1,
    memory_budget=2**20,
    fetch=FetchOptions(),
)


class ClosingMeters(LoaderMeters):
    """Meters that close their runtime right before its engine starts, as another thread may."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime

    def begin(self) -> None:
        closing = threading.Thread(target=self.runtime.close)
        closing.start()
        closing.join()


def test_engine_ends_when_its_runtime_was_closed_while_it_started() -> None:
    runtime = Runtime(SETTINGS, workers="thread")
    runtime.meters = ClosingMeters(runtime)
    with pytest.raises(LoaderClosedError, match="closed"):
        runtime.post(print)
    assert "headrace-engine" not in [thread.name for thread in threading.enumerate()]
