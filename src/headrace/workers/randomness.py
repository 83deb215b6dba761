"""Random numbers that depend on (seed, epoch, position) only, not on the worker."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import pickle
import random
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace._util.context import running_sample
from headrace._util.lazy import when_torch_is_loaded

_MASK = 2**64 - 1
_MASK_32 = 2**32 - 1


class _Current(threading.local):
    """Current sample of a worker's thread, and the generator shared by the thread's samples."""

    def __init__(self) -> None:
        self.bits: np.random.Philox | None = None
        self.generator: np.random.Generator | None = None
        self.key: tuple[int, int] | None = None
        self.key_words = np.zeros(2, np.uint64)
        self.state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": np.zeros(4, np.uint64), "key": self.key_words},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }


_current = _Current()


def rng() -> np.random.Generator:
    """Return the random generator of the current sample.

    Its numbers depend only on the loader's seed, the epoch and the sample's position in the epoch. They are the same
    for any number of workers. A coroutine that makes a sample has its own generator, shared with the tasks it starts.
    Outside a loader the operating system seeds the generator, once per thread.

    Examples:
        >>> def flip(image):
        ...     return image[:, ::-1] if hr.rng().random() < 0.5 else image
    """
    running = running_sample.get()
    if running is not None:
        if running.generator is None:
            running.generator = np.random.Generator(np.random.Philox(key=_philox_key(running.key, running.position)))
        return running.generator
    if _current.generator is None:
        _current.bits = np.random.Philox()
        _current.generator = np.random.Generator(_current.bits)
    if _current.key is not None:
        key, position = _current.key
        assert _current.bits is not None
        _current.key_words[0], _current.key_words[1] = key & _MASK, position & _MASK
        _current.bits.state = _current.state
        _current.key = None
    return _current.generator


def _philox_key(key: int, position: int) -> int:
    key ^= position >> 64  # the hash of a part, see `part_position`
    return key & _MASK | (position & _MASK) << 64


def key_number(key: object) -> int:
    """Return 64 bits for a sample key of any type, equal for equal keys and in every process.

    Integers in that range are their own number and never collide. Others are hashed. Keys other than numbers, text,
    bytes, None, and tuples and frozen sets of these are hashed by their pickle.
    """
    if type(key) is int and 0 <= key <= _MASK:
        return key
    key = _plain(key)
    integer = _integer(key)
    if integer is not None and 0 <= integer <= _MASK:
        return integer
    return int.from_bytes(hashlib.blake2b(_canonical(key), digest_size=8).digest(), "little")


def _canonical(key: object) -> bytes:
    key = _plain(key)
    integer = _integer(key)
    return _typed(key) if integer is None else b"i%d" % integer


@functools.singledispatch
def _typed(key: object) -> bytes:
    """Return the bytes of a key that is not an integer. The first byte is its type."""
    return b"p" + pickle.dumps(key, protocol=5)


@_typed.register
def _(key: float) -> bytes:  # all NaNs are one key
    return b"n" if math.isnan(key) else b"f" + struct.pack("<d", key)


@_typed.register
def _(key: str) -> bytes:
    return b"s" + key.encode("utf-8", "surrogatepass")


@_typed.register
def _(key: bytes) -> bytes:
    return b"b" + key


@_typed.register(tuple)
def _(key: tuple[object, ...]) -> bytes:
    return b"t" + _joined([_canonical(part) for part in key])


@_typed.register(frozenset)
def _(key: frozenset[object]) -> bytes:
    return b"z" + _joined(sorted(_canonical(part) for part in key))


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _plain(key: object) -> object:
    """Return a Python scalar for a numpy scalar or a tensor without dimensions."""
    return key.item() if getattr(key, "ndim", None) == 0 and hasattr(key, "item") else key


def _integer(key: object) -> int | None:
    """Return the integer that a key equals, also for a bool or 2.0."""
    if isinstance(key, float):
        return int(key) if key.is_integer() else None
    if hasattr(key, "__index__"):
        try:
            return operator.index(key)
        except TypeError:  # an array or a tensor with several elements, or not of integers
            return None
    return None


def begin_sample(key: int, position: int) -> None:
    """Make `rng` draw for the sample at `position` of the epoch whose key is `key`.

    Args:
        position: Without positions: `key_number` of the sample's own key.
    """
    if position > _MASK:  # the upper half is the hash of a part, see `part_position`
        key, position = key ^ position >> 64, position & _MASK
    _current.key = (key, position)


def seed_global_generators(key: int, position: int) -> None:
    """Seed the global generators of Python, numpy and torch for a sample.

    Only for worker processes: in the trainer's process these generators belong to the trainer.
    """
    seed = seed_of(key, position)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (users' functions draw from it)
    _seed_torch(seed ^ _MASK_32)  # the same algorithm as numpy's: needs a different seed


def seed_of(key: int, position: int) -> int:
    """Return 32 random bits for a sample, the most that numpy's and torch's generators accept.

    For one key all positions below 2^32 get different seeds: Wellons' "lowbias32" is a permutation
    (https://nullprogram.com/blog/2018/07/31/). Two words of the key are XORed before and after it.
    """
    if position > _MASK:  # the upper half is the hash of a part, see `part_position`
        key, position = key ^ position >> 64, position & _MASK
    first, second = _words(key, position >> 32)
    mixed = (position ^ first) & _MASK_32
    mixed = (mixed ^ mixed >> 16) * 0x7FEB352D & _MASK_32
    mixed = (mixed ^ mixed >> 15) * 0x846CA68B & _MASK_32
    return mixed ^ mixed >> 16 ^ second


@functools.lru_cache(16)
def _words(key: int, high: int) -> tuple[int, int]:
    """Return two words for a key, which may be small, and the upper half of a position."""
    digest = hashlib.blake2b(struct.pack("<QQ", key & _MASK, high & _MASK), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)
    return first, second


class _TorchSeed:
    """Seeds torch's generator. Before torch is imported, it keeps the last seed for later."""

    def __init__(self) -> None:
        self._last = -1  # none yet
        self._set: Callable[[int], object] | None = None

    def __call__(self, seed: int) -> None:
        if self._set is not None:
            self._set(seed)
            return
        is_first, self._last = self._last < 0, seed
        if is_first:
            when_torch_is_loaded(self._begin)

    def _begin(self) -> None:
        from torch import default_generator

        self._set = default_generator.manual_seed  # `torch.manual_seed` takes 70 µs: it also looks for accelerators
        self._set(self._last)


_seed_torch = _TorchSeed()
