"""Megatron's `.idx` files: the dtype of the tokens in the `.bin`, and the documents.

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

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from headrace.formats.tokens.layouts import FirstBytes, damage
from headrace.types import Buffer, Ints

HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class Idx:
    """The head of an `.idx`, and offsets of its tables."""

    url: str
    size: int
    dtype: np.dtype[np.integer]
    sequences: int
    documents: int

    @property
    def lengths(self) -> int:
        return HEAD.size

    @property
    def pointers(self) -> int:
        return self.lengths + 4 * self.sequences

    @property
    def firsts(self) -> int:
        return self.pointers + 8 * self.sequences

    @property
    def end(self) -> int:
        return self.firsts + 8 * (self.documents + 1)


def read_idx(head: FirstBytes) -> Idx:
    """Parse the head of an `.idx`, and check it against the size."""
    if len(head.data) < HEAD.size:
        raise damage(head.url, f"it has {head.size} bytes: an index of Megatron's has {HEAD.size} and more")
    magic, version, code, sequences, entries = HEAD.unpack(head.data[: HEAD.size])
    if magic != _MAGIC:
        raise damage(head.url, f"it begins with {magic!r}: that is no index of Megatron's", 0)
    if version != 1:
        raise damage(head.url, f"it is of version {version}, and 1 is read", 9)
    dtype = np.dtype(_DTYPES[code]) if code in _DTYPES else None
    if dtype is None or dtype.kind not in "iu":
        what = f"type {code}" if dtype is None else f"type {code} ({dtype.name})"
        raise damage(head.url, f"its tokens are of {what}: whole numbers are read, types 1 to 5 and 8", 17)
    if max(sequences, entries) > _MOST:
        raise damage(head.url, f"it counts {sequences} sequences and {entries} entries of documents", 18)
    idx = Idx(head.url, head.size, np.dtype(dtype), sequences, max(entries - 1, 0))
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
