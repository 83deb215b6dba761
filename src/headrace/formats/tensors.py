"""Makes torch tensors of bytes, including dtypes that numpy lacks."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch

from headrace.types import Buffer

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def tensor_of(dtype: str, shape: Sequence[int], data: Buffer) -> torch.Tensor:
    """Return a tensor that owns its memory. A wrong size or unknown dtype is a ValueError."""
    kind: torch.dtype | None = getattr(torch, dtype, None) if dtype in DTYPES else None
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


def loaded_tensors(data: Buffer) -> object:
    """Load data of `torch.save` with tensors, containers and plain values. Executes no code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
