"""A device whose copies end when a test completes them, and slabs that are overwritten once they return."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from headrace._util.shared_memory import Segment
from headrace.delivery.device import Event
from headrace.delivery.slabs import Views

SIZE = 4096


class FakeEvent:
    def __init__(self, copies: list[tuple[torch.Tensor, int, int]]) -> None:
        self._copies = copies
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.complete()

    def complete(self) -> None:
        """Copy now. Only addresses were kept: what they point to by now is what a device would have read."""
        if not self.is_done:
            for target, source, nbytes in self._copies:
                ctypes.memmove(target.data_ptr(), source, nbytes)
            self.is_done = True


class FakeBackend:
    def __init__(self, can_register: bool = True) -> None:
        self.events: list[FakeEvent] = []
        self.received: list[tuple[Event, list[torch.Tensor]]] = []
        self.asked: list[int] = []  # to be registered
        self.registered: list[int] = []
        self.copies_left = 1_000_000
        self._can_register = can_register
        self._begun: list[tuple[torch.Tensor, int, int]] = []
        self._is_copying = False

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self._is_copying = True
        yield
        self._is_copying = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._is_copying
        if not self.copies_left:
            raise MemoryError("the device is full")
        self.copies_left -= 1
        target = torch.zeros_like(tensor)
        self._begun.append((target, tensor.data_ptr(), tensor.nbytes))
        return target

    def record(self) -> Event:
        event = FakeEvent(self._begun)
        self._begun = []
        self.events.append(event)
        return event

    def receive(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        self.received.append((event, list(tensors)))

    def move(self, value: Any) -> Any:
        return value.to("meta")

    def register(self, memory: memoryview) -> bool:
        self.asked.append(address_of(memory))
        if self._can_register:
            assert self.asked[-1] not in self.registered
            self.registered.append(self.asked[-1])
        return self._can_register

    def unregister(self, memory: memoryview) -> None:
        assert all(event.is_done for event in self.events), "copies were reading from there"
        self.registered.remove(address_of(memory))

    def synchronize(self) -> None:
        for event in self.events:
            event.complete()


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


class Slabs:
    """The engine's side as the trainer sees it: a slab that comes back is written over at once."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self.returned: list[int] = []
        self._segments: dict[int, Segment] = {}
        self._views = Views(self._segments, self._take_back, lambda _: None)

    def batch(self, value: int, number: int = 1) -> dict[str, Any]:
        """A batch in a slab, two tensors of it full of `value`."""
        segment = self._segments.get(number) or Segment.create(self._size, number)
        self._segments[number] = segment
        array = self._views.array(number)
        array[:] = value
        return {
            "x": torch.from_numpy(array[: self._size // 2]),
            "y": [torch.from_numpy(array[self._size // 2 :])],
            "name": "n",
        }

    def memory(self, number: int = 1) -> memoryview:
        return self._segments[number].view

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()

    def _take_back(self, number: int) -> None:
        self.returned.append(number)
        segment = self._segments[number]
        if segment.view:
            segment.view[:] = b"\xff" * self._size


def is_full_of(batch: Any, value: int) -> bool:
    return bool((batch["x"] == value).all() and (batch["y"][0] == value).all())
