"""Files of tensors: safetensors."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch

DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
}  # fmt: skip


def file_of(tensors: dict[str, torch.Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in tensors.items():
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        places = [len(body), len(body) + len(data)]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
        body += data
    return whole(header, body)


def whole(header: Any, body: bytes = b"") -> bytes:
    """A file with any header: bytes, or what is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body
