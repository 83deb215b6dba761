"""Arrays and tensors that are views of one memory: of one memory in workers, too, and sent once.

The pickled form of a view holds a buffer of all bytes that it reaches over, gaps included. When all of them are known,
those that overlap are sent as one. A view with gaps that shares its bytes with no other goes without the gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CannotCarryError
from headrace.torch_compat.mappings import Mapped, Mappings, address_of
from headrace.types import Buffer

if TYPE_CHECKING:
    import torch

_Form = tuple[object, ...]
_Numbers = tuple[int, ...]
_COMPARED_AT_MOST = 64  # views with gaps, one by one
_WORK_AT_MOST = 10_000  # steps, for the question whether two of them have bytes in common

Gaps = dict[PickleBuffer, NDArray[np.generic]]
"""Of the buffers with gaps: an array of the elements, of bytes without a meaning."""


class _Bytes:
    """Memory at an address, for numpy."""

    def __init__(self, address: int, size: int, owner: object, *, is_writable: bool = True) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not is_writable),
            "shape": (size,),
            "typestr": "|u1",
        }


def extent(address: int, size: int, owner: object, *, is_writable: bool = True) -> PickleBuffer:
    """The bytes at an address, which keep their owner alive."""
    memory = np.asarray(_Bytes(address, size, owner, is_writable=is_writable))
    return PickleBuffer(memory.data)


def _reach(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """How many bytes lie before the first element of an array, and from there to its end; none of `shape` is 0."""
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def _buffer(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, owner: object, gaps: Gaps, writable: bool
) -> PickleBuffer:
    before, after = _reach(shape, strides, itemsize)
    memory = extent(address - before, before + after, owner, is_writable=writable)
    elements: NDArray[np.generic] = np.ndarray(shape, f"V{itemsize}", memory.raw(), before, strides)
    if elements.nbytes < before + after:
        gaps[memory] = elements
    return memory


def form_of_array(array: NDArray[np.generic], gaps: Gaps, mappings: Mappings | None) -> _Form | None:
    """How an array is pickled; None: numpy does it, as one buffer or object by object, or its class.

    Raises:
        CannotCarryError: its memory is shared, and its class would copy it.
    """
    cls, flags = type(array), array.flags
    if not array.size or not array.itemsize or array.dtype.hasobject:
        return None
    if cls is np.ndarray and (flags.c_contiguous or flags.f_contiguous):
        return None
    memory = _buffer(
        array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize, array, gaps, flags.writeable
    )
    if any(getattr(cls, name) is not getattr(np.ndarray, name) for name in ("__reduce__", "__reduce_ex__")):
        raw = memory.raw()
        mapped = None if mappings is None else mappings.find(address_of(raw), len(raw))
        if mapped is not None and mapped.is_shared:
            raise CannotCarryError(f"a {cls.__qualname__} over memory that processes share pickles in a way of its own")
        return None
    form = memory, array.dtype, array.shape, array.strides
    if cls is np.ndarray:
        return _array, form
    attributes = {name: kept for name, kept in getattr(array, "__dict__", {}).items() if name != "_mmap"}
    return _array_of_class, (*form, cls, attributes)


def _array(memory: memoryview, dtype: np.dtype[np.generic], shape: _Numbers, strides: _Numbers) -> NDArray[np.generic]:
    before, after = _reach(shape, strides, dtype.itemsize)
    if len(memory) < before + after:  # it came without its gaps
        return np.ndarray(shape, dtype, memory)
    return np.ndarray(shape, dtype, memory, before, strides)


def _array_of_class(
    memory: memoryview,
    dtype: np.dtype[np.generic],
    shape: _Numbers,
    strides: _Numbers,
    cls: type[NDArray[np.generic]],
    attributes: dict[str, object],
) -> NDArray[np.generic]:
    array = _array(memory, dtype, shape, strides)
    if issubclass(cls, np.memmap):  # whose base is what `flush` is asked of
        whole: Any = memory.obj
        start = array.__array_interface__["data"][0] - address_of(whole)
        array = np.ndarray.__new__(cls, shape, dtype, whole, start, array.strides)
        array.flags.writeable = not memory.readonly
        attributes["_mmap"] = whole
    else:
        array = array.view(cls)
    for name, kept in attributes.items():
        setattr(array, name, kept)
    return array


def form_of_tensor(tensor: torch.Tensor, gaps: Gaps) -> _Form:
    """How a plain tensor is pickled that has elements."""
    size = tensor.element_size()
    strides = [size * stride for stride in tensor.stride()]
    memory = _buffer(tensor.data_ptr(), tuple(tensor.shape), strides, size, tensor, gaps, True)
    return _tensor, (memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)


def _tensor(
    memory: memoryview, dtype: torch.dtype, shape: _Numbers, stride: _Numbers, requires_grad: bool
) -> torch.Tensor:
    import torch

    flat = torch.frombuffer(memory, dtype=dtype)
    whole = sum(_reach(shape, stride, 1))
    tensor = flat.view(shape) if len(flat) < whole else flat.as_strided(shape, stride)
    return tensor.requires_grad_(requires_grad)


def gathered(
    buffers: Sequence[PickleBuffer], gaps: Gaps, find: Callable[[int, int], Mapped | None]
) -> tuple[list[tuple[int, int, int]], list[tuple[Buffer, Mapped | None]]]:
    """What is sent of buffers, in whose order it is: where each is found, and the memory.

    Args:
        buffers: of what was pickled.
        gaps: those of `form_of_array` and `form_of_tensor`.
        find: says whether a worker maps by itself what lies at an address, of a size.

    Returns:
        For each buffer which memory it lies in, where it begins there, and its size. And each memory, with what `find`
        said of it.
    """
    pieces = [buffer.raw() for buffer in buffers]
    begins = [address_of(piece) if len(piece) else 0 for piece in pieces]
    places = [(0, 0, 0)] * len(buffers)
    sent: list[tuple[Buffer, Mapped | None]] = []
    for group in _overlapping(begins, pieces):
        begin, whole = begins[group[0]], pieces[group[0]]
        if len(group) > 1:
            begin, stop = min(begins[k] for k in group), max(begins[k] + len(pieces[k]) for k in group)
            whole = extent(begin, stop - begin, [pieces[k] for k in group]).raw()
        mapped = find(begin, len(whole))
        with_gaps = {k: gaps[buffers[k]] for k in group if buffers[k] in gaps} if gaps else {}
        if mapped is not None or not with_gaps or _are_one([with_gaps.get(k, pieces[k]) for k in group], len(whole)):
            for k in group:
                places[k] = len(sent), begins[k] - begin, len(pieces[k])
            sent.append((whole, mapped))
            continue
        for k in group:
            memory = _without_gaps(with_gaps[k]) if k in with_gaps else pieces[k]
            places[k] = len(sent), 0, len(memory)
            sent.append((memory, None))
    return places, sent


def _overlapping(begins: Sequence[int], pieces: Sequence[memoryview]) -> list[list[int]]:
    """The numbers of pieces, by what overlaps; in an order that does not depend on where they happen to lie."""
    groups: list[list[int]] = []
    stop = 0
    for k in sorted(range(len(pieces)), key=begins.__getitem__):
        if len(pieces[k]) and begins[k] < stop:
            groups[-1].append(k)
        else:
            groups.append([k])
        stop = max(stop, begins[k] + len(pieces[k]))
    return sorted(sorted(group) for group in groups)


def _are_one(views: Sequence[memoryview | NDArray[np.generic]], size: int) -> bool:
    """Whether views have bytes in common, or the memory that they reach over is no more than they are by themselves."""
    if len(views) == 1:
        return False
    if size <= sum(view.nbytes for view in views) or len(views) > _COMPARED_AT_MOST:
        return True
    share: Any = np.shares_memory
    try:
        return any(share(one, other, max_work=_WORK_AT_MOST) for one, other in itertools.combinations(views, 2))
    except RuntimeError:  # it takes longer
        return True


def _without_gaps(elements: NDArray[np.generic]) -> memoryview:
    flat = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return flat.data
