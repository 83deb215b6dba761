"""LitData's chunks as their writer lays them out, made here from the layout."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import zstandard
from builders.mds import chunk, put
from torch.utils import _pytree

__all__ = ["catalogue", "chunk", "entry", "folder", "framed", "item", "of_tables", "put"]

TENSORS = {
    torch.float32: 1, torch.float64: 3, torch.complex64: 5, torch.float16: 9, torch.bfloat16: 10, torch.uint8: 11,
    torch.int8: 12, torch.int16: 14, torch.int32: 16, torch.int64: 18, torch.bool: 19,
}  # fmt: skip
ARRAYS = {
    "int8": 0, "int16": 1, "int32": 2, "int64": 3, "uint8": 4, "float16": 8, "float32": 9, "float64": 10, "bool": 13,
}  # fmt: skip
FRAME_ITEMS = 4


def serializer_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"no_header_tensor:{TENSORS[value.dtype]}" if value.ndim == 1 else "tensor"
    if isinstance(value, np.ndarray):
        return f"no_header_numpy:{ARRAYS[value.dtype.name]}" if value.ndim == 1 else "numpy"
    return {bool: "bool", int: "int", float: "float", str: "str", bytes: "bytes", type(None): "none"}[type(value)]


def leaf(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, torch.Tensor):
        data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return data if ":" in name else _shaped(">", TENSORS[value.dtype], value.shape) + data
    if isinstance(value, np.ndarray):
        return value.tobytes() if ":" in name else _shaped("<", ARRAYS[value.dtype.name], value.shape) + value.tobytes()
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int | float):
        return struct.pack("<d" if isinstance(value, float) else "<q", value)
    return b"" if value is None else str(value).encode()


def _shaped(order: str, dtype: int, shape: Sequence[int]) -> bytes:
    return struct.pack(f"{order}{2 + len(shape)}I", dtype, len(shape), *shape)


def item(sample: Any, names: Sequence[str]) -> bytes:
    leaves = [leaf(name, value) for name, value in zip(names, _pytree.tree_leaves(sample), strict=True)]
    return struct.pack(f"<{len(leaves)}I", *map(len, leaves)) + b"".join(leaves)


def framed(items: Sequence[bytes], per_frame: int = FRAME_ITEMS) -> bytes:
    groups = [items[at : at + per_frame] for at in range(0, len(items), per_frame)]
    packed = [zstandard.compress(b"".join(group)) for group in groups]
    offsets = np.cumsum([0, *map(len, items)]).astype("<u4").tobytes()
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(items), per_frame, len(groups)) + offsets
    at = len(head) + 24 * len(groups)
    table = b""
    for k, (group, one) in enumerate(zip(groups, packed, strict=True)):
        table += struct.pack("<IIQII", k * per_frame, len(group), at, len(one), sum(map(len, group)))
        at += len(one)
    return head + table + b"".join(packed)


def folder(
    chunks: Sequence[Sequence[Any]], level: str | None = None, names: Sequence[str] | None = None, **config: Any
) -> dict[str, bytes]:
    """The files of a folder, by name, the first chunk first; `level`: what is compressed by itself."""
    first = next((samples[0] for samples in chunks if len(samples)), {})
    flat, spec = _pytree.tree_flatten(first)
    names = [serializer_of(value) for value in flat] if names is None else names
    files: dict[str, bytes] = {}
    said = []
    for number, samples in enumerate(chunks):
        items = [item(sample, names) for sample in samples]
        if level == "sample":
            items = [zstandard.compress(one) for one in items]
        data = framed(items) if level == "batch" and items else chunk(items)
        name = f"chunk-0-{number}{'.zstd' if level == 'chunk' else ''}.bin"
        files[name] = zstandard.compress(data) if level == "chunk" else data
        said.append(entry(name, data, len(items)))
    config = {"data_format": list(names), "data_spec": _pytree.treespec_dumps(spec), **config}
    if level is not None:
        config = {"compression": "zstd", **({} if level == "chunk" else {"compression_level": level}), **config}
    return {**files, "index.json": catalogue(said, **config)}


def entry(name: str, data: bytes, count: int, dim: int | None = None) -> dict[str, Any]:
    return {"chunk_bytes": len(data), "chunk_size": count, "dim": dim, "filename": name}


def catalogue(entries: Sequence[dict[str, Any]], **config: Any) -> bytes:
    about = {"chunk_bytes": None, "chunk_size": 7, "compression": None, "data_spec": None, "encryption": None}
    about |= {"item_loader": "PyTreeLoader", **config}
    return json.dumps({"chunks": entries, "config": about, "updated_at": "1.0"}).encode()


def of_tables(tables: Mapping[str, tuple[int, bytes]], **config: Any) -> dict[str, bytes]:
    """The files of a folder of Parquet files, and LitData's index of them; `tables`: (rows, bytes) by their names."""
    said = [entry(name, data, rows) for name, (rows, data) in tables.items()]
    about = {"chunk_size": None, "data_format": ["int64", "string"], "item_loader": "ParquetLoader", "types": None}
    return {**{name: data for name, (_, data) in tables.items()}, "index.json": catalogue(said, **(about | config))}
