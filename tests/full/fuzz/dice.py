"""Decisions that are read from bytes, so that a fuzzer that changes bytes changes what is built of them."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
_TELLING = (0, 1, 9, 10, 32, 34, 47, 48, 57, 64, 92, 123, 125, 127, 128, 255)


class Dice:
    """Takes decisions from the front of `data`; when it is used up, all of them are 0."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def number(self, most: int) -> int:
        width = (most.bit_length() + 7) // 8
        return int.from_bytes(self.some(width), "little") % (most + 1)

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.number(len(choices) - 1)]

    def some(self, count: int) -> bytes:
        """The next `count` bytes, fewer where they are used up."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def rest(self) -> bytes:
        return self.some(len(self._data))


def starts(*ways: int) -> Iterator[bytes]:
    """Inputs that choose each combination of so many ways, with bytes for a few edits."""
    for chosen in itertools.product(*map(range, ways)):
        for more in (b"", b"\1\2\3\4\5\6\7\x08", b"\0\x80\xff\4\1\xf0\x20\2", bytes(range(16))):
            yield bytes(chosen) + more


def assert_named(error: Exception, name: str) -> None:
    assert name in str(error)


def edited(data: bytes, dice: Dice, edits: int) -> bytes:
    """`data` after up to `edits` changes."""
    return edited_at(data, dice, edits, 1)[0]


def edited_at(data: bytes, dice: Dice, edits: int, unit: int) -> tuple[bytes, list[int]]:
    """`data` after up to `edits` changes, and their offsets. Multiples of `unit` bytes are moved."""
    changed, places = bytearray(data), []
    for _ in range(edits):
        if not dice.more:
            break
        what, at, value = dice.number(6), dice.number(0xFFFF) * (len(changed) + 1) >> 16, dice.number(255)
        start, length = at // unit * unit, (value % 8 + 1) * unit
        if what == 0 and at < len(changed):
            changed[at] ^= 1 << value % 8
        elif what == 1 and at < len(changed):
            changed[at] = value
        elif what == 2:
            del changed[start : start + length]
        elif what == 3:
            changed[start:start] = changed[start : start + length]
        elif what == 4:
            changed[start : start + length] = bytes(len(changed[start : start + length]))
        elif what == 5:
            changed[at : at + 1] = bytes([_TELLING[value % len(_TELLING)]])
        elif what == 6 and value < 64:
            del changed[at:]
        places.append(at)
    return bytes(changed), places


def changed(data: bytes, source: random.Random) -> bytes:
    """`data` with a few pseudo-random changes, as a fuzzer without knowledge of the code would make them."""
    return edited(data, Dice(source.randbytes(4 * 5)), source.randint(1, 4))


def changed_folder(files: dict[str, bytes], dice: Dice, which: int, numbers: int) -> tuple[bytes, bytes]:
    """The shard and the catalogue of a folder. Which of them is edited, or the first `numbers` numbers of the shard."""
    shard, catalogue = files.values()
    if which == 0:
        shard = edited(shard, dice, 1 + dice.number(3))
    elif which == 1:
        catalogue = edited(catalogue, dice, 1 + dice.number(3))
    else:
        for _ in range(1 + dice.number(2)):
            at = 4 * dice.number(numbers)
            number = dice.one_of((0, 1, 2**16, 2**31, 2**32 - 1, len(shard), len(shard) + 1, dice.number(600)))
            shard = shard[:at] + struct.pack("<I", number) + shard[at + 4 :]
    return shard, catalogue
