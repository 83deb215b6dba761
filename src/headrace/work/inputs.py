"""The samples of a task: what parts describe, out of the segments that a worker was told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.tasks import Description, member_pieces
from headrace.torch_compat import packing
from headrace.types import Ints, Rows


class Bodies:
    """The members of samples, in the ranges that were fetched.

    Args:
        views: the ranges.
        first: the address at which each begins, ascending.
    """

    def __init__(self, views: Sequence[memoryview], first: Sequence[int]) -> None:
        self._views, self._first = views, first
        self._ends = [address + len(view) for address, view in zip(first, views, strict=True)]

    def one(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset`."""
        if not size:
            return b""  # which may lie in no range
        pieces = member_pieces(self._first, self._ends, offset, size)
        return b"".join(self._views[k][a:b] for k, a, b in pieces)

    def all(self, offsets: Ints, sizes: Ints) -> list[bytes]:
        """The bytes of each (offset, size)."""
        if not self._views:
            return [b""] * len(offsets)  # none of them has any bytes
        ends = (offsets + sizes).tolist()
        if len(self._views) == 1:
            view, begin = self._views[0], self._first[0]
            return [
                bytes(view[start - begin : stop - begin]) for start, stop in zip(offsets.tolist(), ends, strict=True)
            ]
        spans = (np.searchsorted(self._first, offsets, side="right") - 1).tolist()
        bodies = []
        for start, stop, span in zip(offsets.tolist(), ends, spans, strict=True):
            begin = self._first[span]
            is_inside = stop <= self._ends[span]
            bodies.append(
                bytes(self._views[span][start - begin : stop - begin]) if is_inside else self.one(start, stop - start)
            )
        return bodies

    def gather(self, offsets: Ints, length: int) -> NDArray[np.uint8]:
        """The `length` bytes at each of `offsets`: `[len(offsets), length]`."""
        if not length or not len(offsets):
            return np.empty((len(offsets), length), np.uint8)
        if len(self._views) == 1:
            return _rows(self._views[0], offsets - self._first[0], length)
        out = np.empty((len(offsets), length), np.uint8)
        spans = np.searchsorted(self._first, offsets, side="right") - 1
        reaches_over = offsets + length > np.asarray(self._ends)[spans]
        for k in np.flatnonzero(reaches_over).tolist():
            out[k] = np.frombuffer(self.one(int(offsets[k]), length), np.uint8)
        for span in np.unique(spans[~reaches_over]).tolist():
            chosen = np.flatnonzero((spans == span) & ~reaches_over)
            out[chosen] = _rows(self._views[span], offsets[chosen] - self._first[span], length)
        return out


def _rows(view: memoryview, offsets: Ints, length: int) -> NDArray[np.uint8]:
    array = np.frombuffer(view, np.uint8)
    windows = np.lib.stride_tricks.as_strided(array, (len(array) - length + 1, length), (1, 1), writeable=False)
    return windows[offsets]  # one copy for each row


class Inputs:
    """Gives samples out of segments by number."""

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}

    def attach(self, number: int, view: memoryview) -> None:
        """Make a segment known."""
        self._segments[number] = view

    def detach(self, number: int) -> None:
        """Forget a segment."""
        self._segments.pop(number, None)

    def view(self, place: tuple[int, ...]) -> memoryview:
        """The bytes at (segment's number, offset, size)."""
        number, offset, size = place
        return self._segments[number][offset : offset + size]

    def bodies(self, places: Sequence[tuple[int, int, int, int]]) -> Bodies:
        """The bytes of the ranges at (first address, segment's number, offset, size)."""
        return Bodies([self.view(place[1:]) for place in places], [place[0] for place in places])

    def samples(self, parts: Sequence[Description], busy: dict[str, float]) -> Iterator[Any]:
        """The samples of the described parts, in order."""
        for kind, *rest in parts:
            began = time.perf_counter()
            ways: dict[str, Callable[..., list[Any]]] = {
                "raw": self._raw,
                "packed": self._packed,
                "list": _listed,
                "keys": packing.unpack_bytes,
            }
            samples = ways[kind](*rest)
            busy["read"] = busy.get("read", 0.0) + time.perf_counter() - began
            yield from samples

    def _packed(self, place: tuple[int, int, int], lengths: Sequence[int], start: int, stop: int) -> list[Any]:
        samples: list[Any] = packing.unpack(self.view(place), lengths, copy=True)
        return samples[start:stop]

    def _raw(
        self, rows: Rows, shards: Any, urls: Sequence[str], places: Sequence[tuple[int, int, int, int]]
    ) -> list[dict[str, Any]]:
        bodies = self.bodies(places)
        names = [rows.fields[number] for number in rows.field.tolist()]
        values, starts = bodies.all(rows.offset, rows.size), rows.starts.tolist()
        samples: list[dict[str, Any]] = []
        for key, shard, start, stop in zip(rows.keys.tolist(), shards.tolist(), starts, starts[1:], strict=False):
            sample: dict[str, Any] = {"__key__": key.decode("utf-8", "surrogateescape"), "__url__": urls[shard]}
            sample.update(zip(names[start:stop], values[start:stop], strict=True))
            samples.append(sample)
        return samples


def _listed(samples: list[Any], start: int, stop: int) -> list[Any]:
    return samples[start:stop]
