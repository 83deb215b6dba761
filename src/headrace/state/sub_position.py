"""Positions of samples made from other samples: many from one, or a batch from many."""

from __future__ import annotations

import hashlib
import struct

_BITS = 64
_MASK = (1 << _BITS) - 1


def part_position(position: int, part: int, place: int) -> int:
    """Return the position of the `part`-th sample made by step `place` from one at `position`.

    The first sample keeps that position. The others have a hash in the upper half, so that their random numbers differ.
    """
    if not part:
        return position
    packed = struct.pack("<QQQQ", position & _MASK, position >> _BITS, part, place)
    mixed = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return position & _MASK | mixed << _BITS


def divided(position: int) -> tuple[int, int]:
    """Split into (position in the epoch of the source's sample, hash that identifies the part)."""
    return position & _MASK, position >> _BITS
