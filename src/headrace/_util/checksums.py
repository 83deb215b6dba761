"""Checksums of objects."""

from __future__ import annotations

import google_crc32c

from headrace.types import Buffer


def crc32c_of(data: Buffer) -> int:
    return int(google_crc32c.value(bytes(data)))
