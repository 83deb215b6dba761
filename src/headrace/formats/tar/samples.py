"""Groups the members of a tar archive into samples, as WebDataset does.

The key of a member's sample is its name up to the first dot after the last slash. The rest after the dot, in lower
case, is the field. Consecutive members with one key are a sample. Members are skipped if their base name has no dot or
begins with one, and if they, or their top-level folder, are named like `__this__`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import BLOCK, key_of, shown
from headrace.formats.tar.regular import regular_samples
from headrace.types import Ints


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
