"""Data sets of numbers, orders and saved arrays, and the memory that calls allocate."""

from __future__ import annotations

import inspect
import io
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import numpy as np

import headrace as hr
from headrace.order.orders import Order, ShardOrder, ShuffledOrder, Windows


class Made(hr.AsyncDataset):
    """Samples that a plain or an async function makes of their numbers."""

    def __init__(self, make: Callable[[int], Any], count: int = 8) -> None:
        self.make, self.count, self.asked = make, count, list[int]()

    def __len__(self) -> int:
        return self.count

    async def aget(self, key: int) -> Any:
        self.asked.append(key)
        made = self.make(key)
        return await made if inspect.isawaitable(made) else made


class Named(Made):
    """Samples that a function makes of keys of any kind."""

    def __init__(self, names: Sequence[Any], make: Callable[[Any], Any] = str) -> None:
        super().__init__(make, len(names))
        self.names = names

    def keys(self) -> Sequence[Any]:
        return self.names


class Words(Named):
    """Samples that are no dicts, with keys of their own."""

    def __init__(self) -> None:
        super().__init__([f"word-{k}" for k in range(25)])


class Numbers(Made):
    """Numbers. `asked` has those that were asked for in this process."""

    def __init__(self, count: int = 40) -> None:
        super().__init__(int, count)


class Iterated(hr.AsyncIterableDataset):
    """Samples of an asynchronous generator function."""

    def __init__(self, make: Callable[[], AsyncIterator[Any]], ranks_by: Any = None, loop: Any = "engine") -> None:
        self.make, self.ranks_by, self.loop = make, ranks_by, loop

    def aiter(self) -> AsyncIterator[Any]:
        return self.make()


class Counting(hr.AsyncIterableDataset):
    """Numbers that continue from the state. At `end` they start again, without one they continue in the next epoch."""

    def __init__(self, end: int | None = None, make: Callable[[int], Any] = int, ranks_by: Any = None) -> None:
        self.end, self.make, self.ranks_by, self.next = end, make, ranks_by, 0

    async def aiter(self) -> AsyncIterator[Any]:
        if self.ranks_by == "shard_info":
            hr.shard_info()
        while self.next != self.end:
            self.next += 1
            yield self.make(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def is_even(number: int) -> bool:
    return number % 2 == 0


def is_odd(number: int) -> bool:
    return bool(number % 2)


def streamed(samples: Sequence[Any], ranks_by: Any = None) -> Iterated:
    """Samples that an asynchronous generator yields in turn."""

    async def give() -> AsyncIterator[Any]:
        for sample in samples:
            yield sample

    return Iterated(give, ranks_by)


async def later(sample: Any) -> Any:
    """A step on the event loop that changes nothing."""
    return sample


async def is_kept_later(_: Any) -> bool:
    return True


def twice(sample: Any) -> list[Any]:
    return [sample, sample]


def spin(seconds: float) -> None:
    """Use CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that Python held at once, of those that `call` has allocated."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def order_of(sizes: Sequence[int], by: str, key: Sequence[int], windows: Windows) -> Order:
    if by == "global":
        return ShuffledOrder(ShardOrder(np.array(sizes, np.int64), "none", ()), tuple(key))
    return ShardOrder(np.array(sizes, np.int64), by, tuple(key), windows)


def located(order: Order, positions: Iterable[int] | None = None) -> list[list[int]]:
    """(shard, row) at each position; at all of them by default."""
    where = np.arange(order.count) if positions is None else np.array(list(positions), np.int64)
    found: list[list[int]] = np.stack(order.locate(where), axis=1).tolist()
    return found


def saved(save: Callable[..., object], *values: Any, **named: Any) -> bytes:
    """Arrays as written by `save` (np.save, np.savez or np.savez_compressed)."""
    save(out := io.BytesIO(), *values, **named)
    return out.getvalue()


def npy(array: Any) -> bytes:
    return saved(np.save, array)
