"""Pseudo-random numbers and permutations by key: any part of them, in time for that part alone.

All of it belongs to order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from headrace.types import Ints

_U32 = np.uint32
_U64 = np.uint64
_ROUNDS = 6  # 2 and 3 rounds fail tests of serial correlation and chi-squared, 4 and more pass
_SORTED_MOST = 4096  # so few are sorted by random numbers: a network over small sets has few different permutations


def draw(*parts: object) -> int:
    """A 64-bit number that depends on `parts` alone, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def sample_seed(seed: int, epoch: int) -> int:
    """The key from which the random numbers of all samples of an epoch are made, together with their positions."""
    return draw("sample", seed, epoch)


def permutation(positions: Ints, n: int, key: int) -> Ints:
    """Where the pseudo-random permutation of range(n) named by `key` sends `positions`.

    A generalised Feistel network on Z_a x Z_b with a * b just above n, so that walking back into the range is rare
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Memory is that of `positions`.
    """
    if n <= _SORTED_MOST:
        order = np.argsort(numbers(np.arange(n), key), kind="stable")
        return np.asarray(order[np.asarray(positions)], np.int64)
    b = max(1, math.isqrt(max(0, n - 1)) + 1)
    a = -(-n // b)
    keys = _round_keys(key)
    out = _network(np.asarray(positions).astype(_U64), a, b, keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _network(out[outside], a, b, keys)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64)


def window_order(count: int, seed: int, epoch: int, window: int) -> Ints:
    """The order in which the `count` samples of the `window`-th window of an epoch are used."""
    return permutation(np.arange(count), count, draw("window", seed, epoch, window))


def numbers(positions: Ints, key: int) -> NDArray[np.uint64]:
    """A pseudo-random number of 64 bits for each of `positions`, by splitmix64."""
    x = (np.asarray(positions).astype(_U64) + _U64(1)) * _U64(0x9E3779B97F4A7C15) + _U64(key)
    x ^= x >> _U64(30)
    x *= _U64(0xBF58476D1CE4E5B9)
    x ^= x >> _U64(27)
    x *= _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _round_keys(key: int) -> list[np.uint32]:
    """Round keys by splitmix64."""
    keys = []
    for _ in range(_ROUNDS):
        key = (key + 0x9E3779B97F4A7C15) % 2**64
        z = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        keys.append(_U32((z ^ (z >> 31)) >> 32))
    return keys


def _network(x: NDArray[np.uint64], a: int, b: int, keys: list[np.uint32]) -> NDArray[np.uint64]:
    right, left = x // _U64(b), x % _U64(b)  # right in Z_a, left in Z_b; halves keep their modulus, none is swapped
    for r, key in enumerate(keys):
        if r % 2:
            right = (right + (_mixed(left, key) * _U64(a) >> _U64(32))) % _U64(a)
        else:
            left = (left + (_mixed(right, key) * _U64(b) >> _U64(32))) % _U64(b)
    return right * _U64(b) + left


def _mixed(half: NDArray[np.uint64], key: np.uint32) -> NDArray[np.uint64]:
    x = half.astype(_U32) ^ key
    x *= _U32(0x7FEB352D)
    x ^= x >> _U32(15)
    x *= _U32(0x846CA68B)
    x ^= x >> _U32(16)
    return x.astype(_U64)
