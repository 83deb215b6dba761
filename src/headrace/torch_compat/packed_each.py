"""Values pickled one by one and stored together, for samples that are delivered separately."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from headrace.torch_compat.serialize import Pickled, PickledPart, aligned, pack
from headrace.types import Buffer

_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
_ALIKE = frozenset("biufcmMSU")  # numpy dtype kinds that every pickler packs identically: numbers, times and text
_NESTED_AT_MOST = 4


class PackedEach:
    """Values pickled one by one, which share no objects. Pickles are stored first, then buffers.

    Attributes:
        sizes: For each value the bytes of its pickle and of its buffers.
        nbytes: Total size of the values.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.nbytes = 0
        self._pickles: list[Buffer] = []
        self._buffers: list[PickledPart] = []

    @classmethod
    def of(cls, values: Iterable[object]) -> PackedEach:
        packed = cls()
        for value in values:
            packed.add(value)
        return packed

    def add(self, value: object) -> None:
        """Pickle one more value. If that fails, nothing is added."""
        parts: list[PickledPart]
        if is_data(value, has_arrays=True):
            buffers: list[pickle.PickleBuffer] = []
            parts = [pickle.dumps(value, protocol=5, buffer_callback=buffers.append), *(b.raw() for b in buffers)]
        else:
            parts = pack(value)
        first, *behind = parts
        self._pickles += first.pieces if isinstance(first, Pickled) else [first]
        self._buffers += behind
        self.sizes.append(tuple(map(len, parts)))
        self.nbytes += sum(self.sizes[-1])

    def skip(self) -> None:
        self.sizes.append(())

    @property
    def parts(self) -> list[PickledPart]:
        return [b"".join(self._pickles), *self._buffers] if self._pickles else []

    @property
    def pieces(self) -> list[tuple[int, ...]]:
        """For each value (offset, size) of its pickle and of each buffer, in one flat tuple."""
        found = []
        at, buffers_at = 0, aligned(sum(each[0] for each in self.sizes if each))
        for first, *buffers in self.sizes:
            pieces = [at, first]
            at += first
            for size in buffers:
                pieces += (buffers_at, size)
                buffers_at += aligned(size)
            found.append(tuple(pieces))
        return found


def each_size(sizes: Iterable[Sequence[int]]) -> int:
    given = [each for each in sizes if each]
    return aligned(sum(each[0] for each in given)) + sum(aligned(size) for each in given for size in each[1:])


def unpack_each(source: Buffer, sizes: Iterable[Sequence[int]]) -> Iterator[Callable[[], Any]]:
    """Yield a function for each value of `PackedEach` that unpickles it, with memory of its own."""
    sizes, memory = list(sizes), memoryview(source)
    at, buffers_at = 0, aligned(sum(each[0] for each in sizes if each))
    for each in sizes:
        buffers = []
        for size in each[1:]:
            buffers.append(memory[buffers_at : buffers_at + size])
            buffers_at += aligned(size)
        if each:
            data = memory[at : at + each[0]]
            yield partial(_unpacked, data, buffers) if buffers else partial(pickle.loads, data)
            at += each[0]


def _unpacked(data: memoryview, buffers: list[memoryview]) -> Any:
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])


def is_data(
    value: object,
    containers: Container[type] = (dict, list, tuple),
    depth: int = _NESTED_AT_MOST,
    *,
    has_arrays: bool = False,
) -> bool:
    """True if a value consists of text, bytes and Python numbers, with little nesting."""
    kind = type(value)
    if kind in _LEAVES:
        return True
    parts: Any = value
    if has_arrays and kind is np.ndarray:
        return parts.dtype.kind in _ALIKE
    if kind not in containers or not depth:
        return False
    if kind is dict:
        if not _LEAVES.issuperset(map(type, parts)):
            return False
        parts = parts.values()
    return _LEAVES.issuperset(map(type, parts)) or all(
        is_data(part, containers, depth - 1, has_arrays=has_arrays) for part in parts
    )
