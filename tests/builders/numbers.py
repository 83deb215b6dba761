"""Data sets whose samples are their own numbers."""

from __future__ import annotations

import headrace as hr


class Numbers(hr.AsyncDataset):
    """So many of them; it knows which were asked for in its own process."""

    def __init__(self, count: int = 40) -> None:
        self.count, self.asked = count, list[int]()

    def __len__(self) -> int:
        return self.count

    async def aget(self, key: int) -> int:
        self.asked.append(key)
        return key


def is_even(number: int) -> bool:
    return number % 2 == 0


def is_odd(number: int) -> bool:
    return bool(number % 2)
