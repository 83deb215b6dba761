"""Files of tokens, written as their layouts are described, without the code that reads them."""

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from builders.litdata import catalogue, chunk, entry

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
        files[f"chunk-0-{k}.bin"] = data = chunk([item.tobytes() for item in items])
        said.append(entry(f"chunk-0-{k}.bin", data, len(items), sum(map(len, items))))
    config = {"data_format": [leaf], "item_loader": "TokensLoader", **config}
    return {**files, "index.json": catalogue(said, **config)}
