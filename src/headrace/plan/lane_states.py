"""How far lanes are, as JSON; `docs/reference/state.md` specifies it."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.lanes import InputCursor, LaneCursor, LaneProgress

_LANES_MOST = 2**20
_BYTES_MOST = 2**27  # unpacked
_WIDTHS = (1, 2, 4, 8)
_PLAIN_MOST = 512  # bytes that are not worth being compressed, so that all libraries write the same of them


def pack_lanes(progress: LaneProgress) -> dict[str, object]:
    """How far lanes are, as JSON: `unpack_lanes` makes it again.

    Numbers lie in columns, each of so many bytes as its greatest number needs: they are small, and few of them differ.
    """
    cursors = progress.cursors
    lowest = min(cursor.round for cursor in cursors)
    taken = [cursor.taken.to_bytes(-(-cursor.taken.bit_length() // 8), "little") for cursor in cursors]
    columns: list[Iterable[int]] = [
        (cursor.round - lowest for cursor in cursors),
        (cursor.part for cursor in cursors),
        (cursor.offset for cursor in cursors),
        map(len, taken),
        (cursor.check for cursor in cursors),
    ]
    mixed: dict[str, object] = {}
    if progress.tokens:
        of_inputs = zip(*(cursor.inputs for cursor in cursors), strict=True)
        inputs = [[*zip(*some, strict=True)] for some in of_inputs]  # rounds of all lanes, and tokens
        least = [[min(some) for some in column] for column in inputs]
        mixed = {"tokens": list(progress.tokens), "inputs": least}
        # A lane's round is the sum of those of its inputs.
        columns[0] = [0] * len(cursors)
        columns += [
            [number - low for number in some]
            for column, lows in zip(inputs, least, strict=True)
            for some, low in zip(column, lows, strict=True)
        ]
    data = b"".join([*map(_packed, columns), *taken])
    return {
        "turn": progress.turn,
        "lanes": len(cursors),
        "round": lowest,
        **mixed,
        "cursors": base64.b64encode(zlib.compress(data, 9 if len(data) > _PLAIN_MOST else 0)).decode(),
    }


def unpack_lanes(packed: Mapping[str, Any]) -> LaneProgress:
    """The reverse.

    Raises:
        ValueError: this is no such thing.
    """
    turn, count, lowest = (int(packed[name]) for name in ("turn", "lanes", "round"))
    if not 1 <= count <= _LANES_MOST or min(turn, lowest) < 0:
        raise ValueError("lanes must be some, and not be before the begin")
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(packed["cursors"], validate=True), _BYTES_MOST)
    except zlib.error as error:
        raise ValueError(f"lanes cannot be unpacked: {error}") from error
    least = [tuple(map(int, lows)) for lows in packed.get("inputs", ())]
    tokens = tuple(map(int, packed.get("tokens", ())))
    if len(tokens) != len(least) or min((*tokens, *itertools.chain(*least)), default=0) < 0:
        raise ValueError("inputs of lanes make no sense")
    columns = list[Sequence[int]]()
    for _ in range(5 + 2 * len(least)):
        width = data[0] if data else 0
        if width not in _WIDTHS or len(data) < 1 + width * count:
            raise ValueError("lanes are cut off")
        columns.append(np.frombuffer(data, f"<u{width}", count, 1).tolist())
        data = data[1 + width * count :]
    sizes, more = columns[3], columns[5:]
    if len(data) != sum(sizes) or not unzip.eof:
        raise ValueError("lanes are cut off, or too many")
    inputs = [
        [InputCursor(first + a, second + b) for a, b in zip(*more[2 * k : 2 * k + 2], strict=True)]
        for k, (first, second) in enumerate(least)
    ]
    cursors, at = list[LaneCursor](), 0
    for lane, (round_, part, offset, size, check) in enumerate(zip(*columns[:5], strict=True)):
        own = tuple(some[lane] for some in inputs)
        whole = sum(cursor.round for cursor in own) if own else lowest + round_
        cursors.append(LaneCursor(whole, part, offset, int.from_bytes(data[at : at + size], "little"), own, check))
        at += size
    return LaneProgress(turn, tuple(cursors), tokens)


def joined(ranks: Sequence[LaneProgress | None]) -> LaneProgress | None:
    """How far the lanes of all ranks are, which lie one behind the other; None: at the begin.

    Raises:
        ValueError: not all of them are behind the same step.
    """
    known = [one for one in ranks if one is not None]
    steps = {divmod(one.turn, len(one.cursors)) for one in known}
    if not steps:
        return None
    if len(known) < len(ranks) or len(steps) > 1 or any(rest for _, rest in steps):
        raise ValueError(f"they are behind different steps: {sorted(steps)}")
    ((step, _),) = steps
    cursors = tuple(cursor for one in known for cursor in one.cursors)
    return LaneProgress(step * len(cursors), cursors, tuple(map(sum, zip(*(one.tokens for one in known), strict=True))))


def part_of(progress: LaneProgress, lanes: range) -> LaneProgress:
    """How far some of the lanes are.

    Raises:
        ValueError: some lanes are a step further than others, or there are not so many.
    """
    step, rest = divmod(progress.turn, len(progress.cursors))
    if len(lanes) == len(progress.cursors):
        return progress
    if rest or lanes.stop > len(progress.cursors):
        raise ValueError("it is in the middle of a step, or of fewer lanes")
    # What all lanes have given counts with the first of them, so that it is the sum again where ranks are joined.
    tokens = progress.tokens if lanes.start == 0 else (0,) * len(progress.tokens)
    return LaneProgress(step * len(lanes), progress.cursors[lanes.start : lanes.stop], tokens)


def _packed(column: Iterable[int]) -> bytes:
    """How many bytes each number has, and the numbers."""
    numbers = np.array(list(column), np.uint64)
    width = next(width for width in _WIDTHS if int(numbers.max()) < 256**width)
    return bytes([width]) + numbers.astype(f"<u{width}").tobytes()
