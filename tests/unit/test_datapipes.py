"""Seeding data pipes of torch in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

from headrace.torch_compat.datapipes import seeded

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
    inside, release, errors = threading.Event(), threading.Event(), list[Exception]()

    def first() -> None:
        inside.set()
        release.wait(30)

    def seed(pipe: Numbers) -> None:
        try:
            seeded(pipe, 1)
        except Exception as error:
            errors.append(error)

    one = threading.Thread(target=seed, args=(Numbers(first),))
    other = threading.Thread(target=seed, args=(Numbers(lambda: None),))
    one.start()
    assert inside.wait(30)
    other.start()
    other.join(0.2)  # it waits; else it ends now, with torch's error
    release.set()
    one.join()
    other.join()
    assert not errors
