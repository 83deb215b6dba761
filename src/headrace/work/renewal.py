"""Whether what workers were told is still what the trainer has: compared byte for byte, never by a digest."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from headrace.torch_compat.serialize import packed_size
from headrace.types import Buffer

_STEP_BYTES = 2**20  # stays in the processor's cache


def is_written(parts: Sequence[Buffer], lengths: Sequence[int], target: memoryview) -> bool:
    """Whether `serialize.write(parts, target)`, which has given `lengths`, would change nothing."""
    if tuple(map(len, parts)) != tuple(lengths):
        return False
    offset = 0
    for part in parts:
        if not _are_equal(memoryview(part), target[offset : offset + len(part)]):
            return False
        offset += packed_size([part])
    return True


def are_same(descriptors: Sequence[int], others: Sequence[int]) -> bool:
    """Whether the same files, shared memory and connections lie behind them."""
    return [_identity(fd) for fd in descriptors] == [_identity(fd) for fd in others]


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _are_equal(one: memoryview, other: memoryview) -> bool:
    a, b = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    words = len(a) // 8 * 8
    wide_a, wide_b = a[:words].view(np.uint64), b[:words].view(np.uint64)
    step = _STEP_BYTES // 8
    return bool((a[words:] == b[words:]).all()) and all(
        (wide_a[at : at + step] == wide_b[at : at + step]).all() for at in range(0, len(wide_a), step)
    )
