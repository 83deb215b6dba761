"""What the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Leaves

import headrace as hr


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
