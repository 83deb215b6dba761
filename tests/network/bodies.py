"""Bytes to serve."""

from __future__ import annotations


def numbered(size: int) -> bytes:
    """`size` bytes that tell where they lie."""
    return b"".join(n.to_bytes(4, "big") for n in range(size // 4 + 1))[:size]
