"""The samples of a task: what parts describe, out of the segments that a worker was told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.tasks import Description, member_pieces
from headrace.torch_compat import packing
from headrace.types import Rows


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
        views = [self.view(place[1:]) for place in places]
        first = [place[0] for place in places]
        ends = [place[0] + place[3] for place in places]
        starts, fields, names = rows.starts.tolist(), rows.field.tolist(), rows.fields
        offsets, sizes = rows.offset.tolist(), rows.size.tolist()
        samples = []
        for k, (key, shard) in enumerate(zip(rows.keys.tolist(), shards.tolist(), strict=True)):
            sample: dict[str, Any] = {"__key__": key.decode("utf-8", "surrogateescape"), "__url__": urls[shard]}
            for m in range(starts[k], starts[k + 1]):
                offset, size = offsets[m], sizes[m]
                inside = offset - first[0]
                if len(views) == 1 or (inside >= 0 and offset + size <= ends[0]):
                    body = bytes(views[0][inside : inside + size])
                else:
                    body = b"".join(views[s][a:b] for s, a, b in member_pieces(first, ends, offset, size))
                sample[names[fields[m]]] = body
            samples.append(sample)
        return samples


def _listed(samples: list[Any], start: int, stop: int) -> list[Any]:
    return samples[start:stop]
