"""Compares the headers of members with an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._util.sample_ranges import Rows
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import BLOCK, header_name, shown
from headrace.formats.tar.samples import plain_members
from headrace.formats.tar.scanner import TarScanner
from headrace.types import Ints

_SHORT = "S101"
_FEWEST_MEMBERS = 32  # measured: below, a loop takes less time than arrays
_MOST = 2**53
# the data are already in memory, and were checked against the limits when they were indexed
_NO_LIMITS = Limits(member_bytes=_MOST, header_bytes=_MOST, name_bytes=_MOST, extension_chain=_MOST, fields=_MOST)


class MemberNames(NamedTuple):
    """Member names according to an index. They are not joined: an index may claim long names.

    Attributes:
        sample: Index in `keys` of each member's sample.
        field: Index in `fields` of each member's field.
    """

    keys: NDArray[np.bytes_]
    sample: Ints
    fields: tuple[str, ...]
    field: NDArray[np.int32]

    @staticmethod
    def of(rows: Rows, members: Ints) -> MemberNames:
        """Return the names of some members of a table. `members` ascend."""
        sample = np.searchsorted(rows.starts, members, side="right") - 1
        first, last = (int(sample[0]), int(sample[-1])) if len(sample) else (0, -1)
        return MemberNames(rows.keys[first : last + 1], sample - first, rows.fields, rows.field[members])

    def take(self, members: Sequence[int]) -> MemberNames:
        return self._replace(sample=self.sample[members], field=self.field[members])

    def name(self, member: int) -> bytes:
        return bytes(self.keys[self.sample[member]]) + _suffix(self.fields[self.field[member]])

    def short(self, members: Ints) -> NDArray[np.bytes_]:
        """Return the names of several members, truncated to the size of a plain header."""
        fields = np.array([_suffix(name) for name in self.fields], _SHORT)
        return np.strings.add(self.keys.astype(_SHORT)[self.sample[members]], fields[self.field[members]]).astype(
            _SHORT
        )


def _suffix(field: str) -> bytes:
    return b"." + field.encode("utf-8", "surrogateescape")


def misplaced(view: memoryview, names: MemberNames, bodies: Ints, sizes: Ints) -> dict[int, str]:
    """Return a description of each member whose header differs from the index, by its number.

    `view` is a part of an archive, `bodies` are ascending offsets in it. Members with headers outside of `view` are not
    compared, nor is the first member, as its header may begin before `view`.
    """
    heads = bodies - BLOCK
    is_doubtful = (heads >= 0) & (bodies <= len(view)) & (np.arange(len(heads)) > 0)
    if len(heads) >= _FEWEST_MEMBERS:
        even = np.flatnonzero(is_doubtful & (heads % BLOCK == 0))
        said_names, said_sizes = plain_members(view, heads[even])
        is_doubtful[even] = (said_names != names.short(even)) | (said_sizes != sizes[even])
    wrong: dict[int, str] = {}
    for k in np.flatnonzero(is_doubtful).tolist():
        body, wanted = int(bodies[k]), (names.name(k), int(sizes[k]))
        alone = _plain_member(view[body - BLOCK : body])
        if alone == wanted:
            continue
        behind_last = int(bodies[k - 1] + sizes[k - 1]) + BLOCK - 1 & -BLOCK
        extended = _member_at(view, behind_last, body)  # with all extended headers in between
        if wanted not in (extended, _member_at(view, body - BLOCK, body)):
            what = "no header of a member" if alone is None else f"{shown(alone[0])} of {alone[1]} bytes"
            wrong[k] = f"in front of {shown(wanted[0])} of {wanted[1]} bytes is {what}"
    return wrong


def _plain_member(header: memoryview) -> tuple[bytes, int] | None:
    """Return (name, size) of the header of a regular member. None for any other header."""
    block = bytes(header)
    digits = block[124:136].strip(b" \0")
    if block[156:157] not in (b"0", b"\0") or not digits or digits.strip(b"01234567"):
        return None
    return header_name(block), int(digits, 8)


def _member_at(view: memoryview, begin: int, body: int) -> tuple[bytes, int] | None:
    """Return (name, size) of the member with its body at `body` and headers from `begin` on."""
    if begin >= body or (body - begin) % BLOCK:
        return None
    scanner = TarScanner("", _NO_LIMITS)
    scanner.feed(view[begin:body], 0, last=False)
    if scanner.error is not None or scanner.member is None:
        return None
    name, at, size = scanner.member
    return (_as_indexed(name), size) if at == body - begin else None


def _as_indexed(name: bytes) -> bytes:
    dot = name.find(b".", name.rfind(b"/") + 1)
    return name[:dot] + _suffix(name[dot + 1 :].decode("utf-8", "surrogateescape").lower()) if dot >= 0 else name
