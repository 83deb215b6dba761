"""TFRecord files: in whatever pieces they come, the records are found; each opens or is a ValueError."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from builders import tfrecords
from full.fuzz.dice import Dice
from full.fuzz.scanned import PIECES, scanned

from headrace.formats.format import Block
from headrace.formats.limits import Limits
from headrace.formats.tfrecord import TFRECORD, RecordScanner, sample_of

LIMITS = Limits(member_bytes=300, fields=8)
URL = "memory://fuzz/records"
SAMPLE = {"b": b"x", "f": np.arange(3, dtype=np.float32), "i": np.arange(-3, 30), "l": [b"", b"a"]}


def seeds() -> Iterator[bytes]:
    example = tfrecords.example(SAMPLE)
    whole = tfrecords.file_of([SAMPLE, {}, {"b": b"y" * 200}])
    for piece in range(len(PIECES)):
        yield bytes([0, piece]) + whole
        yield bytes([0, piece]) + whole[: 40 * piece]
    yield b"\1" + example
    yield b"\1" + tfrecords.example(SAMPLE, packed=False)
    yield b"\1" + tfrecords.sequence_example(SAMPLE, {"w": [[b"a"], [b"b", b"c"]]})


def check(data: bytes) -> None:
    dice = Dice(data)
    if dice.number(255) % 2:
        _check_example(dice.rest())
        return
    piece, whole = dice.one_of(PIECES), dice.rest()
    lines, _, error = scanned(lambda: RecordScanner(URL, LIMITS), whole, piece, first=0)
    found = [(at, size) for _, at, size in lines]
    assert found == plain(whole)
    assert (error is None) == (sum(found[-1:] and found[-1]) == len(whole) if found else not whole)
    for at, size in found:
        try:
            TFRECORD.open_block(Block("u", ("record",), LIMITS), [whole[at : at + size]])
        except ValueError:
            continue
        assert tfrecords.masked(whole[at + 12 : at + size - 4]) == whole[at + size - 4 : at + size]


def plain(data: bytes) -> list[tuple[int, int]]:
    """The records up to one that is not whole, not right, or too long."""
    found, at = [], 0
    while at + 12 <= len(data) and tfrecords.masked(data[at : at + 8]) == data[at + 8 : at + 12]:
        (length,) = struct.unpack_from("<Q", data, at)
        if length > LIMITS.member_bytes or at + 16 + length > len(data):
            break
        found.append((at, 16 + length))
        at += 16 + length
    return found


def _check_example(data: bytes) -> None:
    try:
        sample = sample_of(data, frozenset(), LIMITS)
    except ValueError:
        return
    assert len(sample) <= LIMITS.fields
    known = {name: value for name, value in sample.items() if not _is_of_lists(value)}
    again = sample_of(tfrecords.example(known), frozenset(), LIMITS)
    assert list(again) == list(known)
    for name, value in known.items():
        assert type(value) is type(again[name])
        assert np.array_equal(value, again[name], equal_nan=isinstance(value, np.ndarray) and value.dtype.kind == "f")


def _is_of_lists(value: object) -> bool:
    return isinstance(value, list) and any(not isinstance(one, bytes) for one in value)
