"""Keyed pseudo-random numbers and permutations with random access.

Everything here is part of order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.types import Ints

Words = NDArray[np.uint64]

_U32 = np.uint32
_U64 = np.uint64
_GAMMA = _U64(0x9E3779B97F4A7C15)
_LOW = _U64(0xFFFFFFFF)
_ROUNDS = 6  # tests (correlation, chi-squared) show clear traces of 2 and 3, faint ones of 4 and 5, none of 6
SORTED_MOST = 4096  # up to this, random numbers are sorted: networks over small sets have few permutations
_PLACE = _U64(SORTED_MOST - 1)  # low bits of a random number that are replaced by its place, for sorting
_NARROW_MOST = 2**32
_PIECE = 16384  # positions per call of a network, whose arrays then fit in a core's cache


def draw(*parts: object) -> int:
    """Return a 64-bit number that depends only on `parts`, whatever process or machine."""
    plain = tuple(int(part) if isinstance(part, np.integer) else part for part in parts)  # without numpy's repr
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "little")


def sample_seed(seed: int, epoch: int) -> int:
    """Return the key of an epoch from which, with positions, samples' random numbers are made."""
    return draw("sample", seed, epoch)


def window_order(count: int, seed: int, epoch: int, window: int) -> Ints:
    """Return the order in which the `count` samples of a window are used."""
    return permutation(np.arange(count), count, draw("window", seed, epoch, window))


def permutation(positions: Ints, n: int, key: int) -> Ints:
    """Return the images of `positions` under the permutation of range(n) given by `key`.

    For small n, random numbers are sorted, so all permutations are equally likely. For large n, a generalised Feistel
    network on Z_a x Z_b is used with a * b just above n, so cycle walking back into the range is rare (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). Memory is proportional to `positions`.
    """
    positions = np.asarray(positions, np.int64)
    if n <= SORTED_MOST:
        return np.asarray(sorted_orders(n, _words(key))[0][positions], np.int64)
    return _sent(positions, n, list(_round_keys(_words(key))[:, 0]))


def permutations(positions: Ints, n: int, keys: Words) -> Ints:
    """Return `permutation` with a key for each position."""
    if n > SORTED_MOST:
        pieces = range(0, len(positions), _PIECE)
        sent = [_sent(positions[k : k + _PIECE], n, list(_round_keys(keys[k : k + _PIECE]))) for k in pieces]
        return np.concatenate(sent) if sent else np.zeros(0, np.int64)
    result = np.empty_like(positions)
    unique, which = np.unique(keys, return_inverse=True)
    at_once = max(1, _PIECE * 16 // max(1, n))
    if len(unique) <= at_once:
        result[:] = sorted_orders(n, unique)[which, positions]
        return result
    for first in range(0, len(unique), at_once):
        mine = np.flatnonzero((which >= first) & (which < first + at_once))
        result[mine] = sorted_orders(n, unique[first : first + at_once])[which[mine] - first, positions[mine]]
    return result


def sorted_orders(n: int, keys: Words) -> NDArray[np.uint16]:
    """Return a permutation of range(n) per key, by sorting n random numbers. n is at most 4096."""
    places = np.arange(n, dtype=_U64)
    drawn = numbers(places, keys[:, None])
    drawn &= ~_PLACE
    drawn |= places  # with the place as tie-breaker, any sorting algorithm gives the same result
    drawn.sort(axis=1)
    drawn &= _PLACE
    return drawn.astype(np.uint16)


def numbers(positions: Ints | Words, key: int | Words) -> Words:
    """Return a 64-bit splitmix64 number for each position. The key is mixed first."""
    steps = np.asarray(positions).astype(_U64) + _U64(1)
    steps *= _GAMMA
    return _mixed(steps + _mixed(_words(key) if isinstance(key, int) else key.copy()))


def below(drawn: Words, n: int | Ints) -> Ints:
    """Map 64-bit numbers to range(n), by the high half of their products with n."""
    high, low = drawn >> _U64(32), drawn & _LOW
    n_high, n_low = np.asarray(n >> 32).astype(_U64), np.asarray(n & 0xFFFFFFFF).astype(_U64)
    middle, other = high * n_low, low * n_high
    carried = ((low * n_low >> _U64(32)) + (middle & _LOW) + (other & _LOW)) >> _U64(32)
    return np.asarray(high * n_high + (middle >> _U64(32)) + (other >> _U64(32)) + carried, np.int64)


def _words(key: int) -> Words:
    return np.array([key % 2**64], _U64)


def _mixed(x: Words) -> Words:
    """Apply the finisher of splitmix64, in place."""
    x ^= x >> _U64(30)
    x *= _U64(0xBF58476D1CE4E5B9)
    x ^= x >> _U64(27)
    x *= _U64(0x94D049BB133111EB)
    x ^= x >> _U64(31)
    return x


def _round_keys(keys: Words) -> NDArray[np.uint32]:
    return (numbers(np.arange(_ROUNDS)[:, None], keys) >> _U64(32)).astype(_U32)


RoundKeys = Sequence[np.uint32 | NDArray[np.uint32]]


def _sent(positions: Ints, n: int, keys: RoundKeys, *, narrow: bool | None = None) -> Ints:
    """Apply the network to positions, repeatedly until they are in range(n)."""
    b = math.isqrt(n - 1) + 1
    a = -(-n // b)
    network = _narrow_network if (n <= _NARROW_MOST if narrow is None else narrow) else _wide_network
    result = np.empty(len(positions), np.int64)
    for first in range(0, len(positions), _PIECE):
        piece = slice(first, first + _PIECE)
        result[piece] = network(positions[piece], a, b, keys)
    outside = np.flatnonzero(result >= n) if a * b != n else np.zeros(0, np.int64)
    while len(outside):
        mine = [key if np.ndim(key) == 0 else key[outside] for key in keys]  # type: ignore[index]
        result[outside] = network(result[outside], a, b, mine)
        outside = outside[result[outside] >= n]
    return result


def _narrow_network(positions: Ints, a: int, b: int, keys: RoundKeys) -> NDArray[np.uint32]:
    """Apply the network for a, b <= 2**16, in 32-bit words: twice as fast as the wide one."""
    whole = positions.astype(_U32)
    right = whole // _U32(b)
    left = whole  # right in Z_a, left in Z_b; halves keep their modulus and are not swapped
    left -= right * _U32(b)
    drawn, spare = np.empty_like(whole), np.empty_like(whole)
    for r, key in enumerate(keys):
        source, target, modulus = (left, right, _U32(a)) if r % 2 else (right, left, _U32(b))
        np.bitwise_xor(source, key, out=drawn)
        drawn *= _U32(0x7FEB352D)
        np.right_shift(drawn, _U32(15), out=spare)
        drawn ^= spare
        drawn *= _U32(0x846CA68B)
        np.right_shift(drawn, _U32(16), out=spare)  # from here: drawn = drawn * modulus >> 32
        spare *= modulus
        drawn &= _U32(0xFFFF)
        drawn *= modulus
        drawn >>= _U32(16)
        drawn += spare
        drawn >>= _U32(16)
        target += drawn
        np.subtract(target, modulus, out=drawn)
        np.minimum(target, drawn, out=target)  # values below the modulus have wrapped to large numbers in `drawn`
    right *= _U32(b)
    right += left
    return right


def _wide_network(positions: Ints, a: int, b: int, keys: RoundKeys) -> Words:
    right, left = np.divmod(positions.astype(_U64), _U64(b))
    for r, key in enumerate(keys):
        source, target, modulus = (left, right, _U64(a)) if r % 2 else (right, left, _U64(b))
        drawn = source.astype(_U32) ^ key
        drawn *= _U32(0x7FEB352D)
        drawn ^= drawn >> _U32(15)
        drawn *= _U32(0x846CA68B)
        target += drawn.astype(_U64) * modulus >> _U64(32)
        target -= np.where(target >= modulus, modulus, _U64(0))
    return right * _U64(b) + left
