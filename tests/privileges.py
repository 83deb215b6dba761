"""Privileges of the process, and code without them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_VERSION = 0x20080522  # of linux/capability.h


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Half(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """This thread, and those that it starts, may do no more than any user while this lasts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, halves = _Header(_VERSION, 0), (_Half * 2)()
    assert libc.capget(ctypes.byref(header), ctypes.byref(halves)) == 0
    before = [half.effective for half in halves]

    def have(effective: list[int]) -> None:
        for half, value in zip(halves, effective, strict=True):
            half.effective = value
        assert libc.capset(ctypes.byref(header), ctypes.byref(halves)) == 0

    have([0, 0])
    try:
        yield
    finally:
        have(before)
