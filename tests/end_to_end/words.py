"""A data set of one's own, for tests that put several together."""

from __future__ import annotations

import asyncio

import headrace as hr


class Words(hr.AsyncDataset):
    """Samples that are no dicts, with keys of their own."""

    def __len__(self) -> int:
        return 25

    def keys(self) -> list[str]:
        return [f"word-{k}" for k in range(25)]

    async def aget(self, key: str) -> str:
        await asyncio.sleep(0)
        return key
