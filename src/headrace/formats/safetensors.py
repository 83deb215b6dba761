"""Safetensors files: u64 length of a JSON header, the header, the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace._util.reads import Reads
from headrace.errors import LimitError
from headrace.formats.format import (
    Block,
    Format,
    RowsOfBlock,
    ShardEntry,
    errors_named,
    index_of_file,
    rows_of_one_block,
)
from headrace.formats.index import ShardIndex
from headrace.formats.json_values import as_count, as_list, as_object, as_text
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.types import Buffer

if TYPE_CHECKING:
    import torch

_DTYPES = {
    **{f"I{bits}": (f"int{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": (f"float{bits}", bits // 8) for bits in (16, 32, 64)},
    "BOOL": ("bool", 1),
    "BF16": ("bfloat16", 2),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}
_NAMES = frozenset(("complex128", *(name for name, _ in _DTYPES.values())))
_FIRST_BYTES = 64 * 1024
_BYTES_MOST = 2**53
_DIMENSIONS_MOST = 64
_ROW_BYTES = 64  # maximum memory of a row before it is read


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafeTensors(Format):
    """Files of named tensors. Each file is a sample, each tensor a field.

    Args:
        rows: Return rows as samples instead, along the first dimension, which all tensors share.

    Examples:
        >>> data = hr.stream("https://example.org/{0..3}.safetensors", format=hr.SafeTensors(rows=True))
    """

    name = "safetensors"
    suffixes = (".safetensors",)

    def __init__(self, *, rows: bool = False) -> None:
        self.rows = rows

    def sniff(self, name: str, head: bytes) -> float:
        length = int.from_bytes(head[:8], "little")
        return 0.7 if 2 <= length < _BYTES_MOST and head[8:10] in (b'{"', b"{}") else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        if not self.rows:
            return await index_of_file(reads, shard, "tensors", limits)
        with errors_named(shard.url):
            return await _index_of_rows(reads, shard.url, limits)

    def gives_tensors(self, entries: Sequence[ShardEntry]) -> bool:
        return True

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        (data,) = bodies
        end = _header_end(data, block.limits)
        tensors = _tensors_of(data[8:end], len(data) - end, block.limits)
        view = memoryview(data)[end:]
        if not self.rows:
            return [{one.name: tensor_of(one.dtype, one.shape, view[one.start : one.stop]) for one in tensors}]
        return _RowsOf(tensors, view)


class _RowsOf(RowsOfBlock):
    def __init__(self, tensors: Sequence[_Tensor], data: memoryview) -> None:
        self._tensors, self._data, self._count = tensors, data, _rows_of(tensors)
        self.nbytes = len(data)

    def __len__(self) -> int:
        return self._count

    def row(self, number: int) -> dict[str, object]:
        row: dict[str, object] = {}
        for one in self._tensors:
            step = (one.stop - one.start) // self._count
            row[one.name] = tensor_of(one.dtype, one.shape[1:], self._data[one.start + number * step :][:step])
        return row


SAFETENSORS = SafeTensors()


def _header_end(head: bytes | memoryview, limits: Limits) -> int:
    if len(head) < 8:
        raise ValueError("it is cut off in its header")
    length = int.from_bytes(head[:8], "little")
    check_bytes("its header", length, limits.header_bytes)
    return 8 + length


def _tensors_of(header: bytes, nbytes: int, limits: Limits) -> list[_Tensor]:
    """Parse the header. The tensors must fill the `nbytes` after it."""
    try:
        said = as_object(json.loads(header, object_pairs_hook=_once))
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if said is None:
        raise ValueError("its header is no JSON object")
    if len(said) > limits.fields + 1:
        raise LimitError(f"it has {len(said)} tensors, over the limit of {limits.fields}")
    tensors = [_tensor(name, as_object(one) or {}) for name, one in said.items() if name != "__metadata__"]
    end = 0
    for one in sorted(tensors, key=lambda one: (one.start, one.stop)):
        if one.start != end:
            raise ValueError(f"tensor {one.name[:80]!r} begins at byte {one.start}, the one before it ends at {end}")
        end = one.stop
    if end != nbytes:
        raise ValueError(f"its tensors end at byte {end} of {nbytes}")
    return tensors


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _tensor(name: str, said: dict[str, object]) -> _Tensor:
    dtype, size = _DTYPES.get(as_text(said.get("dtype")) or "", ("", 0))
    shape, places = _counts(said.get("shape")), _counts(said.get("data_offsets"))
    if not dtype:
        raise ValueError(f"tensor {name[:80]!r} has the dtype {str(said.get('dtype'))[:40]!r}, which is not read")
    if shape is None or len(shape) > _DIMENSIONS_MOST:
        raise ValueError(f"tensor {name[:80]!r} has the shape {str(said.get('shape'))[:80]}")
    if places is None or len(places) != 2:
        raise ValueError(f"tensor {name[:80]!r} is at {str(said.get('data_offsets'))[:80]}")
    start, stop = places
    if stop - start != math.prod(shape) * size:
        raise ValueError(f"tensor {name[:80]!r} of {shape} {dtype} is in {stop - start} bytes")
    return _Tensor(name, dtype, tuple(shape), start, stop)


def _counts(said: object) -> list[int] | None:
    listed = as_list(said)
    counts = [count for count in (as_count(one, _BYTES_MOST) for one in listed or ()) if count is not None]
    return counts if listed is not None and len(counts) == len(listed) else None


def _rows_of(tensors: Sequence[_Tensor]) -> int:
    counts = {one.shape[0] if one.shape else -1 for one in tensors}
    if len(counts) > 1 or -1 in counts:
        shapes = ", ".join(f"{one.name[:40]} {list(one.shape)}" for one in tensors[:8])
        raise ValueError(f"its tensors do not share their first dimension ({shapes}), so they have no rows")
    count = counts.pop() if counts else 0
    if count and all(one.start == one.stop for one in tensors):
        raise ValueError(f"its {count} rows have no bytes")
    return count


async def _index_of_rows(reads: Reads, url: str, limits: Limits) -> ShardIndex:
    shard = PinnedObject(reads, url)
    head = await shard.head(_FIRST_BYTES)
    check_bytes("all of it", shard.size, limits.member_bytes)
    end = _header_end(head, limits)
    if end > shard.size:
        raise ValueError("it is cut off in its header")
    head = await shard.head(end)
    count = _rows_of(_tensors_of(bytes(head[8:end]), shard.size - end, limits))
    if count > limits.member_bytes // _ROW_BYTES:
        raise LimitError(f"it has {count} rows, over the limit of {limits.member_bytes // _ROW_BYTES}")
    return ShardIndex(rows_of_one_block(count, 0, shard.size, "tensors"), None, shard.size, shard.etag)


def tensor_of(dtype: str, shape: Sequence[int], data: Buffer) -> torch.Tensor:
    """Return a tensor that owns its memory. A wrong size or unknown dtype is a ValueError."""
    import torch

    kind: torch.dtype | None = getattr(torch, dtype, None) if dtype in _NAMES else None
    if kind is None:
        raise ValueError(f"its dtype {dtype!r} is not one of torch {torch.__version__}")
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes != len(data):
        raise ValueError(f"its shape {list(shape)[:64]} takes {nbytes} bytes, and {len(data)} follow")
    try:
        if not nbytes:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.frombuffer(bytearray(data), dtype=kind).reshape(tuple(shape))
    except RuntimeError as error:  # too many dimensions, or too large ones next to a zero
        raise ValueError(f"its shape {list(shape)[:64]} is none of a tensor") from error
