"""Groups the members of a tar archive into samples, as WebDataset does.

The key of a member's sample is its name up to the first dot after the last slash. The rest after the dot, in lower
case, is the field. Consecutive members with one key are a sample. Members are skipped if their base name has no dot or
begins with one, and if they, or their top-level folder, are named like `__this__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import BLOCK, header_name, key_of, shown
from headrace.types import Ints

_HEADER = np.dtype(
    {
        "names": ["name", "size", "size_end", "checksum", "checksum_end", "kind", "prefix"],
        "formats": ["S100", ("u1", 11), "u1", ("u1", 6), "u2", "u1", "u1"],
        "offsets": [0, 124, 135, 148, 154, 156, 345],
        "itemsize": BLOCK,
    }
)
_STEP = Struct("124x11s21xB")
_REGULAR = frozenset(b"0\x007")

# measured: below, a loop takes less time than arrays
_FEWEST_HEADERS = 8
_FEWEST_NAMES = 256


class Run(NamedTuple):
    """Consecutive regular members. Offsets count from the buffer's start.

    `stop` is the next header. `tried` would be `stop` if all headers had been plain.
    """

    names: NDArray[np.bytes_]
    bodies: Ints
    sizes: Ints
    stop: int
    tried: int


def regular_run(view: memoryview, start: int, most: int, member_bytes: int) -> Run:
    """Return up to `most` consecutive members from `start` on whose headers are plain."""
    # sizes are trusted here, and verified below
    hops, tried = _hop(view, start, most)
    if len(hops) < _FEWEST_HEADERS:
        return Run(np.zeros(0, "S1"), np.zeros(0, np.int64), np.zeros(0, np.int64), start, start)
    heads = np.array(hops, np.int64)
    rows = np.frombuffer(view, _HEADER, len(view) // BLOCK).take(heads // BLOCK)
    sizes = _octal(rows["size"])
    plain = _are_plain(rows) & (sizes >= 0) & (sizes <= member_bytes)
    is_old = rows["kind"] == 0
    if is_old.any():
        plain &= ~(is_old & np.char.endswith(rows["name"], b"/"))  # a directory; its size is not that of a body
    count = len(heads) if plain.all() else int(plain.argmin())
    stop = int(heads[count]) if count < len(heads) else tried
    return Run(_names(rows[:count]), heads[:count] + BLOCK, sizes[:count], stop, tried)


def plain_members(view: memoryview, heads: Ints) -> tuple[NDArray[np.bytes_], Ints]:
    """Return the names and sizes in the headers at `heads`. The size is -1 if one is not plain."""
    rows = np.frombuffer(view, _HEADER, len(view) // BLOCK).take(heads // BLOCK)
    is_regular = (rows["kind"] == ord("0")) & (rows["prefix"] == 0)
    return rows["name"], np.where(is_regular, _octal(rows["size"]), -1)


def _hop(view: memoryview, at: int, most: int) -> tuple[list[int], int]:
    """Return the offsets of up to `most` regular headers from `at` on, and the next offset."""
    heads: list[int] = []
    length, step, regular = len(view) - BLOCK, _STEP.unpack_from, _REGULAR
    while at <= length and len(heads) < most:
        digits, kind = step(view, at)
        if kind not in regular:
            break
        try:
            size = int(digits, 8)
        except ValueError:
            break
        if size < 0:
            break
        heads.append(at)
        at += BLOCK + (size + 511 & -BLOCK)
    return heads, at


def _octal(text: NDArray[np.uint8]) -> Ints:
    """Parse octal digits of each row. -1 if a character is not a digit."""
    digits = text - np.uint8(ord("0"))
    numbers = digits @ 8 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return np.where((digits < 8).all(axis=1), numbers, -1)


def _are_plain(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of headers with a checksum of six octal digits and no other text after it."""
    letters = rows.view(np.uint8).reshape(-1, BLOCK)
    total = letters.sum(axis=1, dtype=np.uint32) - letters[:, 148:156].sum(axis=1, dtype=np.uint32) + 8 * ord(" ")
    # clears the one bit in which a space differs from a zero byte
    ends_well = (rows["size_end"] & 0xDF == 0) & (rows["checksum_end"] & 0xDFDF == 0)
    return np.asarray((_octal(rows["checksum"]) == total) & ends_well)


def _names(rows: NDArray[np.void]) -> NDArray[np.bytes_]:
    width = int(np.char.str_len(rows["name"]).max(initial=1))
    names = rows["name"].astype(f"S{width}")
    letters = names.view(np.uint8).reshape(-1, width)
    odd = (rows["prefix"] != 0) | ((letters[:, :-1] == 0) & (letters[:, 1:] != 0)).any(axis=1)
    if odd.any():
        known = names.tolist()
        for k in np.flatnonzero(odd).tolist():
            known[k] = header_name(rows[k].tobytes())
        names = np.array(known, np.bytes_)
    return np.asarray(names)


def regular_samples(names: NDArray[np.bytes_], bodies: Ints, sizes: Ints, limits: Limits) -> Rows:
    """Return the samples of consecutive members. Empty if the general path must handle them.

    That is the case if there are few members, or if one belongs to no sample, exceeds a limit, or is a duplicate.
    """
    if len(names) < _FEWEST_NAMES or names.itemsize > limits.name_bytes:
        return Rows.empty()
    width = names.itemsize + 1  # a zero after every name
    letters = names.astype(f"S{width}").view(np.uint8).reshape(-1, width)
    columns = np.arange(width)
    slashes = letters == ord("/")
    base = np.where(slashes.any(axis=1), width - slashes[:, ::-1].argmax(axis=1), 0)
    dot = ((letters == ord(".")) & (columns >= base[:, None])).argmax(axis=1)
    if ((letters[:, :2] == ord("_")).all(axis=1) | (dot <= base)).any():
        return Rows.empty()
    keys = _strings((letters * (columns < dot[:, None]))[:, : dot.max()])
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]]))
    counts = np.diff(starts)
    # fields are moved to the left, and filled up with zeros from the last column
    behind_dot = np.minimum(dot[:, None] + np.arange(1, width - dot.min()), width - 1)
    raw, number = np.unique(_strings(np.take_along_axis(letters, behind_dot, axis=1)), return_inverse=True)
    fields = [name.decode("utf-8", "surrogateescape").lower() for name in raw.tolist()]
    numbers = {name: k for k, name in enumerate(dict.fromkeys(fields))}
    field = np.array([numbers[name] for name in fields], np.int32)[number]
    members = np.sort(np.repeat(np.arange(len(counts)), counts) * len(numbers) + field)
    has_doubles = (members[1:] == members[:-1]).any()
    if has_doubles or counts.max() > limits.fields or any(name.startswith("__") for name in numbers):
        return Rows.empty()
    return Rows(keys[starts[:-1]], starts, field, bodies, sizes, tuple(numbers))


def _strings(letters: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    return np.ascontiguousarray(letters).view(f"S{letters.shape[1]}").ravel()


class Grouper:
    """Collects members, and returns samples once a member with another key follows."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.drop()

    def drop(self) -> None:
        self._closed: list[Rows] = []  # complete samples; the lists below follow them
        self._is_ended = False  # the last sample is complete, too
        self._begin()

    def _begin(self) -> None:
        self._keys: list[bytes] = []
        self._starts: list[int] = []
        self._field: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._fields: list[str] = []
        self._seen: list[int] = []  # number of the last sample with each field, to find duplicates
        self._numbers: dict[str, int] = {}  # by field
        self._raw_numbers: dict[bytes, int] = {}  # by undecoded field, before conversion to lower case

    @property
    def low(self) -> int | None:
        """Offset of the first body that was added and not taken."""
        if self._closed:
            return int(self._closed[0].offset[0])
        return self._offsets[0] if self._offsets else None

    def add_run(self, names: NDArray[np.bytes_], bodies: Ints, sizes: Ints) -> None:
        """Add members as `add` does, faster for many."""
        rows = regular_samples(names, bodies, sizes, self._limits)
        # the first sample may continue the one before it, and the last one may be incomplete
        first, last = (int(rows.starts[1]), int(rows.starts[-2])) if len(rows) > 2 else (len(names), len(names))
        self.add(names[:first].tolist(), bodies[:first].tolist(), sizes[:first].tolist())
        if first < last:
            self._close(len(self._keys))
            self._closed.append(rows.take(np.arange(1, len(rows) - 1)))
        self.add(names[last:].tolist(), bodies[last:].tolist(), sizes[last:].tolist())

    def add(self, names: Sequence[bytes], bodies: Sequence[int], sizes: Sequence[int]) -> None:
        """Add regular members up to an invalid one, which raises a FormatError or LimitError."""
        keys, starts, field, offsets = self._keys, self._starts, self._field, self._offsets
        key = keys[-1] if keys else None
        seen, numbers, most, longest = self._seen, self._raw_numbers, self._limits.fields, self._limits.name_bytes
        for name, body, size in zip(names, bodies, sizes, strict=True):
            slash = name.rfind(b"/") + 1
            dot = name.find(b".", slash)
            if len(name) > longest:
                self.refuse(name)
                raise LimitError(
                    f"the name {shown(name)} has {len(name)} bytes, over the limit of {longest}", offset=body - BLOCK
                )
            if dot <= slash or (name[:2] == b"__" and _is_reserved(name)):
                continue
            number = numbers.get(name[dot + 1 :])
            if number is None:
                number = self._number(name, dot, body)
            if name[:dot] != key:
                key = name[:dot]
                keys.append(key)
                starts.append(len(offsets))
            elif seen[number] == len(keys):
                raise FormatError(
                    f"the member {shown(name)} is a second field {self._fields[number]!r} of its sample",
                    key=key_of(name),
                    offset=body - BLOCK,
                )
            elif len(offsets) - starts[-1] >= most:
                raise LimitError(
                    f"the sample of the member {shown(name)} has more than {most} members, the limit",
                    key=key_of(name),
                    offset=body - BLOCK,
                )
            seen[number] = len(keys)
            field.append(number)
            offsets.append(body)
            self._sizes.append(size)

    def refuse(self, name: bytes) -> None:
        """Report a regular member over a limit. If it starts a sample, the last one is complete."""
        slash = name.rfind(b"/") + 1
        dot = name.find(b".", slash)
        if dot > slash and not _is_reserved(name) and self._keys:  # others are skipped, and the sample may continue
            self._is_ended = name[:dot] != self._keys[-1]

    def _number(self, name: bytes, dot: int, body: int) -> int:
        field = name[dot + 1 :].decode("utf-8", "surrogateescape").lower()
        if field.startswith("__"):
            raise FormatError(
                f"the member {shown(name)} has a field that begins with '__'; such names are taken",
                key=key_of(name),
                offset=body - BLOCK,
            )
        number = self._numbers.setdefault(field, len(self._fields))
        if number == len(self._fields):
            self._fields.append(field)
            self._seen.append(0)
        self._raw_numbers[name[dot + 1 :]] = number
        return number

    def take(self, *, ended: bool) -> Rows:
        """Return the complete samples that were not taken yet. `ended` completes the last one."""
        self._close(len(self._keys) if ended or self._is_ended else len(self._keys) - 1)
        rows = Rows.concat(self._closed)
        self._closed = []
        return rows

    def _close(self, count: int) -> None:
        if count <= 0:
            return
        split = self._starts[count] if count < len(self._starts) else len(self._offsets)
        self._closed.append(
            Rows(
                np.array(self._keys[:count], np.bytes_),
                np.array([*self._starts[:count], split], np.int64),
                np.array(self._field[:split], np.int32),
                np.array(self._offsets[:split], np.int64),
                np.array(self._sizes[:split], np.int64),
                tuple(self._fields),
            )
        )
        keys, offsets, sizes = self._keys[count:], self._offsets[split:], self._sizes[split:]
        names = [self._fields[number] for number in self._field[split:]]
        self._begin()
        if keys:
            self._keys, self._starts, self._offsets, self._sizes = keys, [0], offsets, sizes
            self._fields, self._field, self._seen = names, list(range(len(names))), [1] * len(names)
            self._numbers = {name: number for number, name in enumerate(names)}


def _is_reserved(name: bytes) -> bool:
    """True if a member, or its top-level folder, is named like `__this__`."""
    top = name.partition(b"/")[0]
    return top[:2] == b"__" and top[2:].endswith(b"__")
