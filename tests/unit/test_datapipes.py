"""Seeding data pipes of torch in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

from headrace.torch_compat.worker_info import seeded

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(IterDataPipe[int]):
    """A pipe that calls `looked` when torch traverses it."""

    def __init__(self, looked: Callable[[], object]) -> None:
        self.looked = looked

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __getstate__(self) -> dict[str, Any]:
        self.looked()
        return {}


def test_one_thread_at_a_time_goes_through_a_pipe() -> None:
    inside, release = threading.Event(), threading.Event()

    def first() -> None:
        inside.set()
        release.wait(30)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(seeded, Numbers(first), 1)
        assert inside.wait(30)
        other = pool.submit(seeded, Numbers(lambda: None), 1)
        try:
            with pytest.raises(TimeoutError):  # it waits; else it ends now, with torch's error
                other.result(0.2)
        finally:
            release.set()
        one.result()
        other.result()
