"""What the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Leaves
from end_to_end.economic import Loader, Make

import headrace as hr
from headrace.work.starter import Helper


class _Nothing(hr.AsyncDataset):
    def __len__(self) -> int:
        return 1

    async def aget(self, key: int) -> int:
        return key


@pytest.fixture(scope="module")
def warm_helper(leaves: Leaves) -> Iterator[None]:
    """The process that workers are forked from stays warm as long as any loader with workers lives."""
    with hr.DataLoader(_Nothing(), num_workers=1) as loader:
        leaves.allow(processes="headrace.work.helper", reason="the helper process of the module's loader")
        yield
        assert loader.num_workers == 1


@pytest.fixture(scope="module")
def warm_workers(leaves: Leaves) -> Iterator[None]:
    """The same process, held without a loader."""
    helper = Helper.acquire()
    leaves.allow(processes="headrace.work.helper", reason="the helper process of the module")
    yield
    helper.release()


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
