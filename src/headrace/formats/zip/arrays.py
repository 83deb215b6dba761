"""The rows of arrays in .npz and .npy files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace._util.reads import Reads, Version
from headrace.errors import FormatError, LimitError, masked
from headrace.formats.folders import errors_named
from headrace.formats.limits import Limits
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.plain import NpyDecoder, npy_header
from headrace.formats.stored_arrays import Array, Names, StoredArray, StoredPart, Table, chosen
from headrace.formats.zip.format import BEHIND_MOST, DEFLATED, HEAD, Member, body_of, directory_of
from headrace.types import Buffer

_HEADER_MOST = 16 * 1024  # of an .npy header; NumPy reads at most 10,000 bytes
_ANY_BYTES = 2**53
_ALONE = "value"


class WholeArray(StoredArray):
    """A compressed or column-major array. All rows are read together, as the member's `part`."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        part: tuple[int, int],
        url: str,
        limits: Limits,
    ) -> None:
        super().__init__(name, dtype, shape, 0)
        self.rows = max(1, self.count)
        self._part, self._url, self._limits = part, url, limits

    def parts(self, number: int) -> Sequence[StoredPart]:  # noqa: ARG002 (there is one)
        return (StoredPart((0,) * len(self.shape), *self._part),)

    def assembled(self, number: int, bodies: Sequence[Buffer]) -> Array:  # noqa: ARG002
        try:
            whole = NpyDecoder()(body_of(bytes(bodies[0]), f"{self.name}.npy".lower(), self._limits))
        except ValueError as error:
            raise FormatError(
                f"{masked(self._url)}: the array {self.name!r} is damaged: {error}", url=self._url
            ) from None
        if whole.shape != self.shape or whole.dtype != self.dtype:
            raise FormatError(f"{masked(self._url)}: the array {self.name!r} is another one", url=self._url)
        return np.ascontiguousarray(whole, self.dtype.newbyteorder("="))


async def npy_table(reads: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    """Return the rows of the array in an .npy file. Its field is "value"."""
    shard = PinnedObject(reads, url)
    head = await shard.read(0, _HEADER_MOST)
    with errors_named(url):
        begin, shape, dtype, by_column = npy_header(head)
        if by_column and len(shape) > 1:
            raise ValueError("it is stored by columns, so its rows are not stored together")
        found = StoredArray(_ALONE, dtype, _with_rows(shape), len(begin))
        if len(begin) + found.count * found.row_bytes != shard.size:
            raise ValueError(
                f"its header describes {found.count * found.row_bytes} bytes, {shard.size - len(begin)} follow"
            )
    fields = chosen(names, [_ALONE], url)
    return Table.of(dict.fromkeys(fields, found), shard.size, url, limits), Version(shard.size, shard.etag)


async def npz_table(reads: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    # members may have any size: the table checks the size of each read
    shard = PinnedObject(reads, url)
    found, _ = await directory_of(shard, replace(limits, member_bytes=_ANY_BYTES))
    members = {member.name.decode().removesuffix(".npy"): member for member in found if _is_array(member)}
    arrays = {}
    for field, name in chosen(names, [*members], url).items():
        try:
            arrays[field] = await _array(shard, name, members[name], limits)
        except LimitError as error:
            raise LimitError(f"{masked(url)}: the array {name!r}: {error.args[0]}", url=url) from None
        except ValueError as error:
            raise FormatError(f"{masked(url)}: the array {name!r} cannot be read: {error}", url=url) from None
    if not arrays:
        raise FormatError(f"{masked(url)} has no arrays", url=url)
    return Table.of(arrays, shard.size, url, limits), Version(shard.size, shard.etag)


def _is_array(member: Member) -> bool:
    return member.name.endswith(b".npy") and member.name.isascii()


async def _array(shard: PinnedObject, name: str, member: Member, limits: Limits) -> StoredArray:
    head = bytes(await shard.read(member.offset, HEAD.size + 2 * len(member.name) + _HEADER_MOST))
    if len(head) < HEAD.size or head[:4] != b"PK\3\4":
        raise ValueError("there is no member where the directory has one")
    _, _, _, method, *_, name_length, extra_length = HEAD.unpack_from(head)
    begin = HEAD.size + name_length + extra_length
    inner = head[begin:]
    if method == DEFLATED:
        try:
            inner = zlib.decompressobj(-zlib.MAX_WBITS).decompress(inner, _HEADER_MOST)
        except zlib.error as error:
            raise ValueError(f"it does not unpack ({error})") from None
    said, shape, dtype, by_column = npy_header(inner)
    nbytes = len(said) + math.prod(_with_rows(shape)) * dtype.itemsize
    if nbytes != member.size:
        raise ValueError(f"its header describes {nbytes} bytes, and it has {member.size}")
    if method == DEFLATED or (by_column and len(shape) > 1):
        stop = min(member.offset + begin + member.packed + BEHIND_MOST, shard.size)
        return WholeArray(name, dtype, shape, (member.offset, stop - member.offset), shard.url, limits)
    return StoredArray(name, dtype, shape, member.offset + begin + len(said))


def _with_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape:
        raise ValueError("it is a single number, and has no rows")
    return shape
