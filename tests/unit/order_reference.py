"""Order 1 in plain Python, one sample at a time, as in docs/reference/order.md, without headrace."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate

_64 = 2**64
_32 = 2**32


def draw(name: str, *numbers: int) -> int:
    text = f"('{name}', {', '.join(map(str, numbers))})" if numbers else f"('{name}',)"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _64
    return x ^ (x >> 31)


def number(p: int, key: int) -> int:
    return mix((mix(key) + (p + 1) * 0x9E3779B97F4A7C15) % _64)


def below(x: int, n: int) -> int:
    return x * n >> 64


def permutation(p: int, n: int, key: int) -> int:
    if n <= 4096:
        return sorted(number(i, key) // 4096 * 4096 + i for i in range(n))[p] % 4096
    b = math.isqrt(n - 1) + 1
    a = -(-n // b)
    keys = [number(r, key) >> 32 for r in range(6)]
    while True:
        right, left = divmod(p, b)
        for r in range(6):
            if r % 2 == 0:
                left = (left + (_f(right, keys[r]) * b >> 32)) % b
            else:
                right = (right + (_f(left, keys[r]) * a >> 32)) % a
        p = right * b + left
        if p < n:
            return p


def _f(x: int, k: int) -> int:
    x = (x ^ k) * 0x7FEB352D % _32
    return (x ^ (x >> 15)) * 0x846CA68B % _32


def turns(lanes: int) -> list[int]:
    width = 0
    while 2**width < lanes:
        width += 1
    reverse = [int(f"{c:0{width}b}"[::-1], 2) if width else 0 for c in range(2**width)]
    return [lane for lane in reverse if lane < lanes]


def place(p: int, sizes: Sequence[int], by: str, key: Sequence[int], lanes: int = 1, block: int = 1) -> tuple[int, int]:
    count, shards = sum(sizes), list(range(len(sizes)))
    if by in ("shards", "windows"):
        shards = [permutation(k, len(sizes), draw("shards", *key)) for k in shards]
    base = p
    if by == "global":
        base = permutation(p, count, draw("global", *key))
    if by == "windows":
        lanes = max(1, min(lanes, count))
        lengths = {lane: count // lanes + (c < count % lanes) for c, lane in enumerate(turns(lanes))}
        lane = turns(lanes)[p % lanes]
        j, i = divmod(p // lanes, block)
        size = min(block, lengths[lane] - j * block)
        first = sum(lengths[other] for other in range(lane))
        shift = below(number(lane, draw("shifts", *key)), lengths[lane])
        inside = j * block + permutation(i, size, number(j * lanes + lane, draw("blocks", *key)))
        base = first + (inside + shift) % lengths[lane]
    ends = list(accumulate(sizes[shard] for shard in shards))
    k = next(k for k, end in enumerate(ends) if base < end)
    shard = shards[k]
    row = base - (ends[k] - sizes[shard])
    if by == "within":
        row = permutation(row, sizes[shard], number(shard, draw("within", *key)))
    return shard, row


def minus_log(numerator: int) -> float:
    m, e = math.frexp(float(numerator))
    e -= 53
    if m < 0.7071067811865476:
        m, e = 2 * m, e - 1
    r = (m - 1) / (m + 1)
    q = r * r
    s = 1 / 25
    for t in range(11, -1, -1):
        s = s * q + 1 / (2 * t + 1)
    return -(2 * r * s) - e * 0.6931471805599453


def drawn(count: int, n: int, key: Sequence[int], weights: Sequence[float] | None, *, replacement: bool) -> list[int]:
    k = draw("drawn", *key)
    if weights is None:
        return [below(number(p, k), n) if replacement else permutation(p, n, k) for p in range(count)]
    having = [i for i in range(n) if weights[i]]
    if not replacement:
        times = {i: minus_log((number(i, k) >> 11) + 1) / weights[i] for i in having}
        return sorted(having, key=lambda i: (times[i], i))[:count]
    sums = list(accumulate(weight / max(weights) for weight in weights))
    found = []
    for p in range(count):
        mark = (number(p, k) >> 11) / 2**53 * sums[-1]
        found.append(next((i for i in range(n) if mark < sums[i]), having[-1]))
    return found


def steps(coming: Sequence[int], end: int, size: int, tail: str, world: int, lanes: int) -> list[list[list[int]]]:
    sizes = [size] * (len(coming) // size)
    rest = len(coming) % size
    coming = list(coming)
    if rest and tail == "pad":
        again = list(range(end)) or coming
        coming += [again[k % len(again)] for k in range(size - rest)]
        sizes.append(size)
    elif rest and tail == "short":
        sizes.append(rest)
        if rest < world:
            both = sizes.pop() + sizes.pop()
            sizes += [-(-both // 2), both // 2] if both // 2 >= world else [both]
    turn, result = turns(lanes), []
    for m in sizes:
        mine, coming = sorted(coming[:m], key=lambda p: (turn[p % lanes], p)), coming[m:]
        result.append([mine[r * m // world : (r + 1) * m // world] for r in range(world)])
    return result
