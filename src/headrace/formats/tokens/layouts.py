"""Locates the tokens of a file, and their dtype, from headers and the size of the file."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headrace.errors import FormatError, OptionError, masked
from headrace.formats.folders import beside, catalogue_entry, check_each_once, file_name
from headrace.formats.json_values import as_count, as_object, as_texts
from headrace.formats.litdata.catalogue import said_by
from headrace.formats.plain import npy_header
from headrace.types import Buffer

Tokens = NDArray[np.integer]

HEAD_BYTES = 16 * 1024
"""Size of the first read of a file. It includes any supported header."""

_LLM_C_BYTES = 1024
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type
_BYTES_MOST = 2**53
# LitData's numbers of integer dtypes, for tensors and for arrays
_LITDATA = {
    "tensor": {11: "|u1", 12: "|i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"},
    "numpy": {0: "|i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "|u1", 5: "<u2", 6: "<u4", 7: "<u8"},
}
_LITDATA_LEAF = re.compile(r"no_header_(tensor|numpy):(\d{1,3})")


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Contiguous tokens in an object.

    Attributes:
        begin: Offset of the first token, in bytes.
        count: Number of tokens.
        dtype: Stored dtype of a token.
        width: Tokens per row. None: not a table.
    """

    url: str
    begin: int
    count: int
    dtype: np.dtype[np.integer]
    size: int
    etag: str | None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class FirstBytes:
    url: str
    data: Buffer
    size: int
    etag: str | None


def token_dtype(dtype: DTypeLike) -> np.dtype[np.integer]:
    """Return the numpy dtype. Raises an OptionError if it is not an integer type."""
    try:
        return whole_numbers(np.dtype(dtype))
    except (TypeError, ValueError):
        text = f"dtype={dtype!r:.80}: a type of whole numbers is needed, such as 'uint16' or 'int32'"
        raise OptionError(text) from None


def whole_numbers(dtype: np.dtype[Any]) -> np.dtype[np.integer]:
    if dtype.kind not in "iu":
        raise ValueError(dtype.name)
    return dtype


def damage(url: str, why: str, offset: int | None = None) -> FormatError:
    return FormatError(f"{masked(url)}: {why}", url=url, offset=offset)


def raw(head: FirstBytes, dtype: np.dtype[np.integer]) -> TokenFile:
    if head.size % dtype.itemsize:
        raise damage(
            head.url,
            f"its {head.size} bytes are no whole number of {dtype.name}s of {dtype.itemsize} bytes: it was cut off, or "
            "has tokens of another type",
        )
    return TokenFile(head.url, 0, head.size // dtype.itemsize, dtype, head.size, head.etag)


def has_llm_c_header(head: FirstBytes) -> bool:
    """True if a file has the header of llm.c."""
    return len(head.data) >= 4 and int.from_bytes(head.data[:4], "little") in _LLM_C


def llm_c(head: FirstBytes) -> TokenFile:
    """Parse a header of 256 32-bit integers: magic, version, number of tokens."""
    if head.size < _LLM_C_BYTES:
        raise damage(head.url, f"it has {head.size} bytes, and its header alone would have {_LLM_C_BYTES}")
    magic, version, count = struct.unpack("<iii", head.data[:12])
    if magic not in _LLM_C:
        known = ", ".join(map(str, _LLM_C))
        raise damage(head.url, f"its header begins with {magic}, and {known} are known", 0)
    wanted, name = _LLM_C[magic]
    dtype = np.dtype(name)
    if version != wanted:
        raise damage(head.url, f"its header is of version {version}, and {wanted} is known of magic {magic}", 4)
    nbytes = head.size - _LLM_C_BYTES
    if count < 0 or count * dtype.itemsize != nbytes:
        raise damage(
            head.url, f"its header describes {count} tokens of {dtype.itemsize} bytes, and {nbytes} bytes follow", 8
        )
    return TokenFile(head.url, _LLM_C_BYTES, count, dtype, head.size, head.etag)


def npy(head: FirstBytes) -> TokenFile:
    """Parse the header of an .npy file with one dimension, or two: rows are then windows."""
    try:
        begins, shape, dtype, by_column = npy_header(memoryview(head.data))
    except ValueError as error:
        raise damage(head.url, str(error)) from None
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise damage(head.url, f"it is an array of {dtype} with the shape {shape}; of whole numbers, with one or two")
    if by_column and len(shape) == 2 and min(shape) > 1:
        raise damage(head.url, f"its rows of the shape {shape} are not stored together (fortran_order)")
    count = math.prod(shape)
    follow = head.size - len(begins)
    if count * dtype.itemsize != follow:
        raise damage(head.url, f"its header describes {count * dtype.itemsize} bytes of array, and {follow} follow")
    width = shape[1] if len(shape) == 2 else None
    return TokenFile(head.url, len(begins), count, whole_numbers(dtype), head.size, head.etag, width)


@dataclass(frozen=True, slots=True)
class Chunk:
    url: str
    items: int
    nbytes: int
    tokens: int
    dtype: np.dtype[np.integer]


def litdata_listed(url: str, data: bytes) -> Sequence[Chunk]:
    _, config, chunks = said_by(url, data)
    if config.get("compression") or config.get("encryption"):
        raise damage(url, "its chunks are compressed or encrypted: windows of tokens cannot be read from such")
    leaves = as_texts(config.get("data_format")) or []
    leaf = _LITDATA_LEAF.fullmatch(leaves[0]) if len(leaves) == 1 else None
    dtype = None if leaf is None else _LITDATA[leaf[1]].get(int(leaf[2]))
    if dtype is None:
        raise damage(url, f"its samples are {str(config.get('data_format'))[:80]}, and no tokens of whole numbers")
    found = [_chunk(url, number, one, np.dtype(dtype)) for number, one in enumerate(chunks)]
    check_each_once(url, (one.url for one in found))
    return found


def _chunk(url: str, number: int, one: object, dtype: np.dtype[np.integer]) -> Chunk:
    said = as_object(one) or {}
    with catalogue_entry(url, f"chunk {number}"):
        name = file_name(said.get("filename"))
    facts = [as_count(said.get(fact), _BYTES_MOST) for fact in ("chunk_size", "chunk_bytes", "dim")]
    if None in facts:
        raise damage(
            url,
            f"chunk {number} has {said!r:.200}: 'chunk_size', 'chunk_bytes' and 'dim' are counts, where it was written "
            "by a TokensLoader",
        )
    items, nbytes, tokens = (fact or 0 for fact in facts)
    return Chunk(beside(url, name), items, nbytes, tokens, dtype)


def litdata(head: FirstBytes, chunk: Chunk) -> TokenFile:
    """Check a LitData chunk: the number of items, their starts, and consecutive tokens."""
    begin = 4 * (chunk.items + 2)
    tokens = chunk.tokens * chunk.dtype.itemsize
    if head.size != begin + tokens:
        raise damage(
            head.url,
            f"it has {head.size} bytes, and {begin} of a header and {tokens} of {chunk.tokens} tokens are in the "
            "catalogue",
        )
    items, first = struct.unpack("<II", head.data[:8])
    if (items, first) != (chunk.items, begin):
        raise damage(head.url, f"it has {items} items from byte {first} on, and not {chunk.items} from {begin} on", 0)
    return TokenFile(head.url, begin, chunk.tokens, chunk.dtype, head.size, head.etag)
