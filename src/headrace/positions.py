"""Positions of samples that come of others: of one sample many, or of many a batch."""

from __future__ import annotations

import hashlib
import struct

_BITS = 64
_MASK = (1 << _BITS) - 1


def part_position(position: int, part: int, place: int) -> int:
    """The position of the sample that is number `part` of those that a step gave for the one at `position`.

    The first one has that sample's own. In each other's upper half is a hash: its random numbers are others.

    Args:
        place: which step it was, among those of its chain.
    """
    if not part:
        return position
    packed = struct.pack("<QQQQ", position & _MASK, position >> _BITS, part, place)
    mixed = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return position & _MASK | mixed << _BITS


def divided(position: int) -> tuple[int, int]:
    """(the position in the epoch of the source's sample, the hash that tells parts of it from each other)."""
    return position & _MASK, position >> _BITS
