"""CRC-32C as RFC 3720 defines it."""

from __future__ import annotations

import sys

import pytest

from headrace.errors import OptionError
from headrace.fetch.checksums import crc32c


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (bytes([0xFF]) * 32, 0x62A8AB43)],
    ids=["nothing", "digits", "zeros", "ones"],
)
def test_right_bytes_pass_and_others_do_not(data: bytes, value: int) -> None:
    check = crc32c(value)
    assert check(data)
    assert check(memoryview(data))
    assert not check(data + b"\0")
    assert not check(b"\1" + data[1:])


def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(OptionError, match=r"headrace\[crc\]"):
        crc32c(0)
