"""Files of tokens, written as their layouts are described, without the code that reads them."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def ids(count: int, dtype: str = "uint16", seed: int = 0) -> np.ndarray[Any, Any]:
    high = min(50_000, np.iinfo(dtype).max)
    return np.random.default_rng(seed).integers(0, high, count).astype(dtype)


def megatron(
    documents: Sequence[Sequence[np.ndarray[Any, Any]]], dtype: str = "uint16", *, modes: bool = False
) -> tuple[bytes, bytes]:
    """(`.bin`, `.idx`) of documents of one or several sequences each."""
    sequences = [np.asarray(one, dtype) for document in documents for one in document]
    lengths = [len(one) for one in sequences]
    pointers = np.concatenate([[0], np.cumsum(lengths)])[: len(lengths)] * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)])
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(firsts))
    tables = [np.array(lengths, "<i4"), pointers.astype("<i8"), firsts.astype("<i8")]
    tables += [np.zeros(len(lengths), "<i1")] if modes else []
    return b"".join(one.tobytes() for one in sequences), head + b"".join(table.tobytes() for table in tables)


def llm_c(tokens: np.ndarray[Any, Any], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens) if count is None else count
    return head.tobytes() + tokens.tobytes()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    np.save(out := io.BytesIO(), array)
    return out.getvalue()


def litdata(
    chunks: Sequence[Sequence[np.ndarray[Any, Any]]], leaf: str = "no_header_tensor:20", **config: object
) -> dict[str, bytes]:
    """The files of a folder; each chunk has some items of tokens."""
    files, said = {}, []
    for k, items in enumerate(chunks):
        bodies = [item.tobytes() for item in items]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, bodies)]).astype("<u4")
        files[f"chunk-0-{k}.bin"] = data = struct.pack("<I", len(items)) + offsets.tobytes() + b"".join(bodies)
        dim = sum(map(len, items))
        said.append({"chunk_bytes": len(data), "chunk_size": len(items), "dim": dim, "filename": f"chunk-0-{k}.bin"})
    known = {"compression": None, "data_format": [leaf], "item_loader": "TokensLoader"} | config
    files["index.json"] = json.dumps({"chunks": said, "config": known, "updated_at": "0"}).encode()
    return files
