"""Where the system does not say what is mapped, files of `np.memmap` and shared tensors are still mapped again."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.lately import torch_is_loaded
from headrace.torch_compat.received import shared_storage

_Memmap = np.memmap[tuple[int, ...], np.dtype[np.generic]]


def form_of(value: object, descriptors: list[int]) -> tuple[object, ...] | None:
    """How a value is pickled whose memory workers are to map; None: they get a copy.

    Args:
        descriptors: those of shared memory are put here.
    """
    if type(value) is np.memmap:
        return _form_of_mapped_file(value)
    if not torch_is_loaded():
        return None
    import torch

    if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" and value.is_shared():
        descriptors.append(os.dup(value._share_fd_cpu_()[0]))
        return shared_storage, (len(descriptors) - 1, value.nbytes())
    return None


def _form_of_mapped_file(array: _Memmap) -> tuple[object, ...] | None:
    """None where the memory is not the file's: copies, changes that are kept private."""
    whole: Any = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    if array.filename is None or array.mode == "c" or array.dtype.hasobject or not isinstance(whole.base, mmap.mmap):
        return None
    if not Path(array.filename).exists():
        return None
    mode = "r" if array.mode == "r" else "r+"
    start = array.ctypes.data - whole.ctypes.data
    form = start, array.dtype, array.shape, array.strides
    return _mapped, (str(array.filename), mode, whole.offset, whole.nbytes, *form)


def _mapped(
    name: str,
    mode: Literal["r", "r+"],
    offset: int,
    size: int,
    start: int,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> _Memmap:
    whole: Any = np.memmap(name, np.uint8, mode, offset, (size,))
    array: Any = np.ndarray(shape, dtype, whole, start, strides).view(np.memmap)
    array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, whole.offset, mode
    made: _Memmap = array
    return made
