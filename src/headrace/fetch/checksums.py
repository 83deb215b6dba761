"""Checks of what was read against what an index says."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import OptionError
from headrace.types import Buffer

Check = Callable[[Buffer], bool]
"""Whether these are the right bytes."""


def crc32c(expected: int) -> Check:
    """A check for the CRC-32C (Castagnoli) `expected`.

    Raises:
        OptionError: the library that computes it is not installed.
    """
    try:
        import google_crc32c
    except ImportError:
        raise OptionError("checks by CRC-32C need google-crc32c: pip install 'headrace[crc]'") from None
    return lambda data: int(google_crc32c.value(bytes(data))) == expected
