"""Random numbers that depend on (seed, epoch, position) alone, whichever worker makes the sample."""

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

from headrace.lately import when_torch_is_loaded
from headrace.running import running_sample

_MASK = 2**64 - 1
_MASK_32 = 2**32 - 1


class _Current(threading.local):
    """The sample that a worker makes in this thread, and the generator that all samples of the thread use in turn."""

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
    """The random generator of the sample that is being made.

    Its numbers depend on the loader's seed, the epoch and the sample's position in the epoch, and on nothing else: they
    are the same for any number of workers. In a coroutine that makes a sample it is that coroutine's own, and of the
    tasks that it starts. Outside a loader it is seeded by the system, once for each thread.

    Examples:
        >>> import headrace as hr
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
    """The two words of a key as one number, the first one lowest."""
    key ^= position >> 64  # a part of the sample at that position
    return key & _MASK | (position & _MASK) << 64


def key_number(key: object) -> int:
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


def _canonical(key: object) -> bytes:
    """A key as bytes, the same for all that are equal to it."""
    key = _plain(key)
    integer = _integer(key)
    return _typed(key) if integer is None else b"i%d" % integer


@functools.singledispatch
def _typed(key: object) -> bytes:
    """A key that is no whole number as bytes, of which the first says its type."""
    return b"p" + pickle.dumps(key, protocol=5)


@_typed.register
def _(key: float) -> bytes:  # what is not a number is one key
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
    """Python's own number, or text, in the place of one of numpy's, or of a tensor without dimensions."""
    return key.item() if getattr(key, "ndim", None) == 0 and hasattr(key, "item") else key


def _integer(key: object) -> int | None:
    """The whole number that a key is: also a bool, or 2.0."""
    if isinstance(key, float):
        return int(key) if key.is_integer() else None
    if hasattr(key, "__index__"):
        try:
            return operator.index(key)
        except TypeError:  # an array or a tensor of several numbers, or of others
            return None
    return None


def begin_sample(key: int, position: int) -> None:
    """Have `rng` draw for the sample at `position` of the epoch whose key is `key`.

    Args:
        position: or the number of the sample's own key, where there are no positions.
    """
    if position > _MASK:  # a part of the sample at that position
        key, position = key ^ position >> 64, position & _MASK
    _current.key = (key, position)


def seed_global_generators(key: int, position: int) -> None:
    """Seed Python's, numpy's and torch's global generators for the same sample.

    Only in a process of our own: in the trainer's process they are the trainer's.
    """
    seed = seed_of(key, position)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (users' functions draw from it)
    _seed_torch(seed ^ _MASK_32)  # its generator is of the same kind as numpy's, and needs another seed


def seed_of(key: int, position: int) -> int:
    """32 random bits for a sample: numpy's and torch's generators take no more.

    For one key no two of the positions below 2^32 have the same. Between two words of the key, position is mixed by
    Wellons' "lowbias32" (https://nullprogram.com/blog/2018/07/31/), a permutation, which makes another of each key.
    """
    if position > _MASK:  # a part of the sample at that position
        key, position = key ^ position >> 64, position & _MASK
    first, second = _words(key, position >> 32)
    mixed = (position ^ first) & _MASK_32
    mixed = (mixed ^ mixed >> 16) * 0x7FEB352D & _MASK_32
    mixed = (mixed ^ mixed >> 15) * 0x846CA68B & _MASK_32
    return mixed ^ mixed >> 16 ^ second


@functools.lru_cache(16)
def _words(key: int, high: int) -> tuple[int, int]:
    """Two words for a key and the high half of a position: keys may be small numbers, and near each other."""
    digest = hashlib.blake2b(struct.pack("<QQ", key & _MASK, high & _MASK), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)
    return first, second


class _TorchSeed:
    """Seeds torch's generator. If torch is not loaded yet, the last seed is set as soon as a function has loaded it."""

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

        self._set = default_generator.manual_seed  # `torch.manual_seed` takes 70 µs: it looks for accelerators, too
        self._set(self._last)


_seed_torch = _TorchSeed()
