"""MDS shards as their writer lays them out, made here from the layout."""

import bz2
import gzip
import hashlib
import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from PIL import Image

from headrace.fetch.stores import memory

DTYPES = {
    "uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33, "float32": 34,
    "uint64": 64, "int64": 65, "float64": 66,
}  # fmt: skip
PACKERS = {"zstd": zstandard.ZstdCompressor().compress, "gz": gzip.compress, "bz2": bz2.compress}


def size_of(encoding: str) -> int | None:
    """Bytes of each value of a column, where they are as many."""
    if encoding == "int":
        return 8
    name, _, more = encoding.partition(":")
    dtype, _, shape = more.partition(":")
    if name == "ndarray":
        return int(np.prod([int(n) for n in shape.split(",")])) * np.dtype(dtype).itemsize if shape else None
    return np.dtype(encoding).itemsize if encoding in DTYPES else None


def encoded(encoding: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    name, _, more = encoding.partition(":")
    if name == "str":
        return str(value).encode()
    if name == "int":
        return struct.pack("<q", value)
    if name in DTYPES:
        return np.dtype(name).newbyteorder("<").type(value).tobytes()
    if name in ("str_int", "str_float", "str_decimal"):
        return str(value).encode()
    if name == "json":
        return json.dumps(value).encode()
    if name == "ndarray":
        dtype, _, shape = more.partition(":")
        head = b"" if dtype else bytes([DTYPES[value.dtype.name]])
        if not shape:
            code = int(max(value.shape) > 255)
            head += bytes([value.ndim << 2 | code]) + np.array(value.shape, ["<u1", "<u2"][code]).tobytes()
        return head + value.tobytes()
    if name in ("jpeg_array", "jpegarray"):
        return _counted(value)
    if name.startswith("list["):
        return bytes(4) + _counted([encoded(name[5:-1], one) for one in value])
    if name == "pil":
        mode = value.mode.encode()
        return struct.pack("<III", *value.size, len(mode)) + mode + value.tobytes()
    if name in ("jpeg", "png"):
        value.save(out := io.BytesIO(), name)
        return out.getvalue()
    raise ValueError(name)


def _counted(values: Sequence[bytes]) -> bytes:
    return struct.pack(f"<I{len(values)}I", len(values), *map(len, values)) + b"".join(values)


def settings(columns: Mapping[str, str]) -> dict[str, Any]:
    names = sorted(columns)
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": ["sha1"],
        "size_limit": 1 << 26,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [size_of(columns[name]) for name in names],
    }


def shard(columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]]) -> bytes:
    said, bodies = settings(columns), []
    for sample in samples:
        values = [encoded(columns[name], sample[name]) for name in said["column_names"]]
        sizes = [len(v) for v, fixed in zip(values, said["column_sizes"], strict=True) if not fixed]
        bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
    return chunk(bodies, json.dumps(said, sort_keys=True).encode())


def chunk(items: Sequence[bytes], config: bytes = b"") -> bytes:
    """Items after their offsets, as in shards of MDS and in chunks of LitData."""
    begin = 4 * (len(items) + 2) + len(config)
    offsets = np.cumsum([begin, *map(len, items)]).astype("<u4")
    return struct.pack("<I", len(items)) + offsets.tobytes() + config + b"".join(items)


def folder(
    columns: Mapping[str, str], shards: Sequence[Sequence[Mapping[str, Any]]], compression: str | None = None
) -> dict[str, bytes]:
    files, said = {}, []
    for number, samples in enumerate(shards):
        raw, name = shard(columns, samples), f"shard.{number:05}.mds"
        one = {**settings(columns), "samples": len(samples), "raw_data": _file(name, raw), "zip_data": None}
        if compression is None:
            files[name] = raw
        else:
            algorithm = compression.partition(":")[0]
            files[f"{name}.{algorithm}"] = packed = PACKERS[algorithm](raw)
            one.update(compression=compression, zip_data=_file(f"{name}.{algorithm}", packed))
        said.append(one)
    files["index.json"] = json.dumps({"version": 2, "shards": said}, sort_keys=True).encode()
    return files


def _file(name: str, data: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}


def put(place: str, files: Mapping[str, bytes]) -> str:
    """The address of a folder in memory that holds these files."""
    for name, data in files.items():
        memory.put(f"memory://{place}/{name}", data)
    return f"memory://{place}"


def pictures() -> list[Image.Image]:
    return [Image.fromarray((np.arange(h * 5 * 3) % 251).astype(np.uint8).reshape(h, 5, 3)) for h in (2, 3)]
