"""Files of tokens: locates tokens by headers and sizes, computes windows and documents, and decodes windows."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headrace._util import check
from headrace._util.sample_ranges import LeasedBodies, Rows, texts_of
from headrace.errors import FormatError
from headrace.formats.catalogues import beside, catalogue_entry, check_each_once, file_name
from headrace.formats.decoders import Column, Columns, npy_header
from headrace.formats.format import Format, keys_of, rows_of_members
from headrace.formats.json_values import as_count, as_object, as_texts
from headrace.formats.litdata.format import said_by, vector_dtype
from headrace.formats.opening import ABOUT
from headrace.types import Buffer, Ints

Tokens = NDArray[np.integer]

HEAD_BYTES = 16 * 1024
"""Size of the first read of a file. It includes any supported header."""

_LLM_C_BYTES = 1024
_BYTES_MOST = 2**53
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type


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
        raise check.invalid("dtype", dtype, "a type of whole numbers, such as 'uint16' or 'int32'") from None


def whole_numbers(dtype: np.dtype[Any]) -> np.dtype[np.integer]:
    if dtype.kind not in "iu":
        raise ValueError(dtype.name)
    return dtype


def damage(url: str, why: str, offset: int | None = None) -> FormatError:
    return FormatError.at(url, f": {why}", offset=offset)


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
    tokens: int
    dtype: np.dtype[np.integer]


def litdata_listed(url: str, data: bytes) -> Sequence[Chunk]:
    _, config, chunks = said_by(url, data)
    if config.get("compression") or config.get("encryption"):
        raise damage(url, "its chunks are compressed or encrypted: windows of tokens cannot be read from such")
    leaves = as_texts(config.get("data_format")) or []
    try:
        dtype = vector_dtype(leaves[0]) if len(leaves) == 1 else None
    except ValueError:
        dtype = None
    if dtype is None or "int" not in dtype:
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
    items, _, tokens = (fact or 0 for fact in facts)
    return Chunk(beside(url, name), items, tokens, dtype)


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


IDX_HEAD = struct.Struct("<9sQBQQ")
_IDX_MAGIC = b"MMIDIDX\0\0"
_IDX_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class Idx:
    """The head of Megatron's `.idx`: the dtype of the tokens in the `.bin`, and offsets of its tables.

    9 bytes       "MMIDIDX" and two zeros
    u64           version, 1
    u8            code of the dtype
    u64           number of sequences
    u64           number of entries of the table of documents: documents + 1
    i32[...]      tokens of each sequence
    i64[...]      offset of each sequence in the `.bin`, in bytes
    i64[...]      number of each document's first sequence, and last the number of sequences
    i8[...]       mode of each sequence; optional
    """

    url: str
    dtype: np.dtype[np.integer]
    sequences: int
    documents: int

    @property
    def lengths(self) -> int:
        return IDX_HEAD.size

    @property
    def pointers(self) -> int:
        return self.lengths + 4 * self.sequences

    @property
    def firsts(self) -> int:
        return self.pointers + 8 * self.sequences


def read_idx(head: FirstBytes) -> Idx:
    """Parse the head of an `.idx`, and check it against the size."""
    if len(head.data) < IDX_HEAD.size:
        raise damage(head.url, f"it has {head.size} bytes: an index of Megatron's has {IDX_HEAD.size} and more")
    magic, version, code, sequences, entries = IDX_HEAD.unpack(head.data[: IDX_HEAD.size])
    if magic != _IDX_MAGIC:
        raise damage(head.url, f"it begins with {magic!r}: that is no index of Megatron's", 0)
    if version != 1:
        raise damage(head.url, f"it is of version {version}, and 1 is read", 9)
    dtype = np.dtype(_IDX_DTYPES[code]) if code in _IDX_DTYPES else None
    if dtype is None or dtype.kind not in "iu":
        what = f"type {code}" if dtype is None else f"type {code} ({dtype.name})"
        raise damage(head.url, f"its tokens are of {what}: whole numbers are read, types 1 to 5 and 8", 17)
    if max(sequences, entries) > _BYTES_MOST:
        raise damage(head.url, f"it counts {sequences} sequences and {entries} entries of documents", 18)
    idx = Idx(head.url, np.dtype(dtype), sequences, max(entries - 1, 0))
    least = idx.firsts + 8 * entries
    if head.size not in (least, least + sequences):
        raise damage(
            head.url,
            f"it counts {sequences} sequences and {entries} entries of documents, which take {least} bytes, or "
            f"{least + sequences} with modes, and it has {head.size}: it was cut off, or its counts are wrong",
            18,
        )
    return idx


class SequenceCheck:
    """Checks, in parts, that sequences are contiguous in the `.bin`, from its start to its end."""

    def __init__(self, idx: Idx) -> None:
        self._idx = idx
        self.begin = 0  # required offset of the next sequence, in bytes
        self._number = 0

    def feed(self, lengths: Buffer, pointers: Buffer) -> Ints:
        """Return the offsets of the next sequences. Raises a FormatError if not contiguous."""
        counts = np.frombuffer(lengths, "<i4").astype(np.int64)
        begins = np.frombuffer(pointers, "<i8")
        ends = self.begin + np.cumsum(counts) * self._idx.dtype.itemsize
        wanted = np.concatenate([[self.begin], ends[:-1]])
        wrong = np.flatnonzero((begins != wanted) | (counts < 0))
        if len(wrong):
            k = int(wrong[0])
            raise damage(
                self._idx.url,
                f"sequence {self._number + k} has {counts[k]} tokens from byte {begins[k]} on, and those before it end "
                f"at {wanted[k]}",
                self._idx.pointers + 8 * (self._number + k),
            )
        self._number += len(counts)
        self.begin = int(ends[-1]) if len(ends) else self.begin
        return np.asarray(begins, np.int64)


def check_firsts(idx: Idx, number: int, firsts: Ints, before: int) -> None:
    """Raise a FormatError unless documents begin with existing sequences, in ascending order.

    `before` is the first sequence of the document before number `number`.
    """
    steps = np.diff(firsts, prepend=before)
    wrong = np.flatnonzero((steps < 0) | (firsts > idx.sequences) | (firsts < 0))
    k = int(wrong[0]) if len(wrong) else None
    if k is None and number == 0 and len(firsts) and firsts[0]:
        k = 0
    if k is not None:
        raise damage(
            idx.url,
            f"document {number + k} would begin with sequence {firsts[k]} of {idx.sequences}, and the one before it "
            f"with {firsts[k - 1] if k else before}",
            idx.firsts + 8 * (number + k),
        )


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """Windows of one length, each `stride` tokens after the one before it.

    `has_short` is True if remaining tokens form a last, shorter window.
    """

    length: int
    stride: int
    has_short: bool = False

    def counts(self, tokens: Ints) -> Ints:
        counts = np.maximum((tokens - self.length) // self.stride + 1, 0)
        if self.has_short:
            shared = max(self.length - self.stride, 0)  # tokens shared with the window before
            counts = np.where(tokens > 0, np.maximum(-((shared - tokens) // self.stride), 1), counts)
        return np.asarray(counts, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class WindowsOfDocuments:
    """Windows that do not cross documents: those of the first document, then those of the next.

    A file without documents counts as one. `documents` are starts and the end of the last. `firsts` are first
    windows, and the number of windows.
    """

    windows: TokenWindows
    documents: Ints
    firsts: Ints

    @classmethod
    def of(cls, windows: TokenWindows, documents: Ints) -> Self:
        """Return the windows of `documents`. Takes 16 bytes of memory per document."""
        firsts = np.zeros(len(documents), np.int64)
        np.cumsum(windows.counts(np.diff(documents)), out=firsts[1:])
        return cls(windows, documents, firsts)

    @property
    def count(self) -> int:
        return int(self.firsts[-1])

    def places(self, numbers: Ints) -> tuple[Ints, Ints]:
        document = np.searchsorted(self.firsts, numbers, side="right") - 1
        begins = self.documents[document] + (numbers - self.firsts[document]) * self.windows.stride
        return begins, np.minimum(begins + self.windows.length, self.documents[document + 1])


def rows_of(file: TokenFile, numbers: Ints, begins: Ints, ends: Ints) -> Rows:
    """Return the table of samples with the tokens [begins, ends). The keys are `numbers`."""
    itemsize = file.dtype.itemsize
    return rows_of_members(keys_of(numbers), file.begin + begins * itemsize, (ends - begins) * itemsize, file.dtype.str)


def rows_with_documents(file: TokenFile, numbers: Ints, begins: Ints, ends: Ints, documents: Ints) -> Rows:
    """Return the table of windows with the tokens of each document as a separate member."""
    itemsize = file.dtype.itemsize
    first = np.searchsorted(documents, begins, side="right")
    stop = np.maximum(np.searchsorted(documents, ends, side="left"), first)
    counts = 1 + stop - first
    starts = np.concatenate([[0], np.cumsum(counts)])
    of_window = np.repeat(np.arange(len(numbers)), counts)
    number = np.arange(starts[-1]) - starts[of_window]  # number of a member in its window
    cuts = documents[np.minimum(first[of_window] + number - 1, len(documents) - 1)] if len(documents) else number
    offset = np.where(number == 0, begins[of_window], cuts)
    end = np.append(offset[1:], 0)
    end[starts[1:] - 1] = ends
    return Rows(
        keys_of(numbers),
        starts,
        number.astype(np.int32),
        file.begin + offset * itemsize,
        (end - offset) * itemsize,
        tuple(f"{file.dtype.str} {k}" for k in range(int(counts.max(initial=1)))),
    )


class TokenFormat(Format):
    """A name for files of tokens. `hr.tokens` reads them, as windows do not depend on the files."""

    name = "tokens"
    suffixes = ()


class TokenOpener:
    """The first step of a stream of tokens. The names of members give the dtype.

    Args:
        eos: Token at the end of each document, for `document_ids`. None: not used.
        has_ids: True if each member is a separate document, for `document_ids`.
    """

    def __init__(self, eos: int | None, *, has_ids: bool) -> None:
        self.eos, self.has_ids = eos, has_ids

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample: its tokens, which own their memory, and the document number of each."""
        names = [name for name in sample if name not in ABOUT]
        bodies = [sample[name] for name in names]
        dtype, native = _dtype(names[0])
        whole = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        tokens = np.frombuffer(whole, dtype).astype(native)
        made = {"__key__": sample["__key__"], "__url__": sample["__url__"], "tokens": tokens}
        if self.has_ids:
            sizes = [len(body) // dtype.itemsize for body in bodies]
            made["document_ids"] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        elif self.eos is not None:
            made["document_ids"] = ids_by_eos(tokens, self.eos)
        return made

    def columns(self, rows: Rows, bodies: LeasedBodies, urls: Sequence[str]) -> Columns | None:
        """Decode many windows at once. None if sizes differ or a window has several members."""
        if self.has_ids or not len(rows) or rows.block is not None or not (np.diff(rows.starts) == 1).all():
            return None
        size = int(rows.size[0])
        if (rows.size != size).any() or (rows.field != rows.field[0]).any():
            return None
        dtype, native = _dtype(rows.fields[int(rows.field[0])])
        shape = (size // dtype.itemsize,)
        values: Tokens | None = None
        if dtype != native or self.eos is not None:
            values = bodies.gather(rows.offset, size).view(dtype).astype(native)
        made: dict[str, Column | Sequence[str]] = {"__key__": texts_of(rows.keys), "__url__": urls}
        made["tokens"] = Column(native, shape, False, 0, rows.offset, values)
        if self.eos is not None and values is not None:
            ids = np.stack([ids_by_eos(one, self.eos) for one in values])
            made["document_ids"] = Column(ids.dtype, shape, False, 0, rows.offset, ids)
        return made


def ids_by_eos(tokens: Tokens, eos: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the document number of each token. A new document begins after each `eos`."""
    ids = np.zeros(len(tokens), np.int32)
    np.cumsum(tokens[:-1] == eos, out=ids[1:])
    return ids


@cache
def _dtype(name: str) -> tuple[np.dtype[np.integer], np.dtype[np.integer]]:
    """Return the (stored, native) dtype from a member's name: dtype, and number of a piece."""
    dtype: np.dtype[np.integer] = np.dtype(name.partition(" ")[0])
    return dtype, dtype.newbyteorder("=")
