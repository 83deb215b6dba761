"""Random numbers that depend on (seed, epoch, position) alone, whichever worker makes the sample."""

from __future__ import annotations

import hashlib
import math
import operator
import pickle
import random
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

_MASK = 2**64 - 1


class _Current(threading.local):
    def __init__(self) -> None:
        self.bits: np.random.Philox | None = None
        self.generator: np.random.Generator | None = None
        self.key: tuple[int, int] | None = None


_current = _Current()


def rng() -> np.random.Generator:
    """The random generator of the sample that is being made.

    Its numbers depend on the loader's seed, the epoch and the sample's position in the epoch, and on nothing else: they
    are the same for any number of workers. Outside a loader it is seeded by the system, once for each thread.

    Examples:
        >>> import headrace as hr
        >>> def flip(image):
        ...     return image[:, ::-1] if hr.rng().random() < 0.5 else image
    """
    if _current.generator is None:
        _current.bits = np.random.Philox()
        _current.generator = np.random.Generator(_current.bits)
    if _current.key is not None:
        key, position = _current.key
        assert _current.bits is not None
        _current.bits.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.zeros(4, np.uint64),
                "key": np.array([key & _MASK, position & _MASK], np.uint64),
            },
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        _current.key = None
    return _current.generator


def key_number(key: Any) -> int:
    """A number of 64 bits for the key of a sample, of any type: the same in every process, and for equal keys.

    Integers in that range are their own number, so that they never meet; others meet as rarely as hashes do. Keys that
    are neither numbers, text, bytes, None nor tuples and frozen sets of those go by their pickle.
    """
    if type(key) is int and 0 <= key <= _MASK:
        return key
    key = _plain(key)
    integer = _integer(key)
    if integer is not None and 0 <= integer <= _MASK:
        return integer
    return int.from_bytes(hashlib.blake2b(_canonical(key), digest_size=8).digest(), "little")


def _canonical(key: Any) -> bytes:
    """A key as bytes, the same for all that are equal to it."""
    key = _plain(key)
    integer = _integer(key)
    if integer is not None:
        return b"i%d" % integer
    if isinstance(key, float):  # what is not a number is one key
        return b"n" if math.isnan(key) else b"f" + struct.pack("<d", key)
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, tuple):
        return b"t" + _joined([_canonical(part) for part in key])
    if isinstance(key, frozenset):
        return b"z" + _joined(sorted(_canonical(part) for part in key))
    return b"p" + pickle.dumps(key, protocol=5)


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _plain(key: Any) -> Any:
    """Python's own number, or text, in the place of one of numpy's, or of a tensor without dimensions."""
    return key.item() if getattr(key, "ndim", None) == 0 and hasattr(key, "item") else key


def _integer(key: Any) -> int | None:
    """The whole number that a key is: also a bool, or 2.0."""
    if isinstance(key, float):
        return int(key) if key.is_integer() else None
    if hasattr(key, "__index__"):
        try:
            return operator.index(key)
        except TypeError:  # an array or a tensor of several numbers, or of others
            return None
    return None


def begin_sample(key: int, position: int, *, everywhere: bool) -> None:
    """Set the generators for the sample at `position` of the epoch whose key is `key`.

    Args:
        position: or the number of the sample's own key, where there are no positions.
        everywhere: set Python's, numpy's and torch's global generators too. Only in a process of our own: in the
            trainer's they are the trainer's.
    """
    _current.key = (key, position)
    if everywhere:
        seed = (key ^ (position * 0x9E3779B97F4A7C15)) & _MASK
        seed = ((seed ^ (seed >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
        import torch

        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (users' functions draw from it)
