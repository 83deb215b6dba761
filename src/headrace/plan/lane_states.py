"""Progress of lanes as JSON, as specified in `docs/reference/state.md`."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.lanes import InputCursor, LaneCursor, LaneProgress

_LANES_MOST = 2**20
_BYTES_MOST = 2**27  # decompressed
_WIDTH_MOST = 8  # bytes per number
_PLAIN_MOST = 512  # bytes; stored uncompressed, so that all zlib versions write the same


def pack_lanes(progress: LaneProgress) -> dict[str, object]:
    """Encode the progress of lanes as JSON; `unpack_lanes` decodes it.

    Numbers are stored by column, and by byte within a column: first the lowest bytes of all rows, then the next ones.
    Each such string is compressed separately. The lowest bytes of token counts are almost random; the higher ones are
    nearly constant.
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
    data = [part for column in columns for part in _packed(column)]
    return {
        "turn": progress.turn,
        "lanes": len(cursors),
        "round": lowest,
        **mixed,
        "cursors": base64.b85encode(_compressed([*data, b"".join(taken)])).decode(),
    }


def unpack_lanes(packed: Mapping[str, Any]) -> LaneProgress:
    """Decode the result of `pack_lanes`.

    Raises:
        ValueError: The input is invalid.
    """
    turn, count, lowest = (int(packed[name]) for name in ("turn", "lanes", "round"))
    if not 1 <= count <= _LANES_MOST or min(turn, lowest) < 0:
        raise ValueError("lanes must be some, and not be before the begin")
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b85decode(packed["cursors"]), _BYTES_MOST)
    except zlib.error as error:
        raise ValueError(f"lanes cannot be unpacked: {error}") from error
    least = [tuple(map(int, lows)) for lows in packed.get("inputs", ())]
    tokens = tuple(map(int, packed.get("tokens", ())))
    if len(tokens) != len(least) or min((*tokens, *itertools.chain(*least)), default=0) < 0:
        raise ValueError("inputs of lanes make no sense")
    columns = list[Sequence[int]]()
    for _ in range(5 + 2 * len(least)):
        width = data[0] if data else 0
        if not 1 <= width <= _WIDTH_MOST or len(data) < 1 + width * count:
            raise ValueError("lanes are cut off")
        numbers = np.zeros((count, _WIDTH_MOST), np.uint8)
        numbers[:, :width] = np.frombuffer(data, np.uint8, width * count, 1).reshape(width, count).T
        columns.append(numbers.view("<u8")[:, 0].tolist())
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
    """Combine the progress of consecutive ranks. None: at the start.

    Raises:
        ValueError: The ranks are at different steps.
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
    """Return the progress of some lanes.

    Raises:
        ValueError: Lanes are within a step, or there are fewer.
    """
    step, rest = divmod(progress.turn, len(progress.cursors))
    if len(lanes) == len(progress.cursors):
        return progress
    if rest or lanes.stop > len(progress.cursors):
        raise ValueError("it is in the middle of a step, or of fewer lanes")
    # Token totals of all lanes stay with the first part, so that `joined` restores the sum.
    tokens = progress.tokens if lanes.start == 0 else (0,) * len(progress.tokens)
    return LaneProgress(step * len(lanes), progress.cursors[lanes.start : lanes.stop], tokens)


def _packed(column: Iterable[int]) -> list[bytes]:
    """Split numbers by byte. The first part starts with the number of bytes."""
    numbers = np.array(list(column), "<u8")
    width = max(1, -(-int(numbers.max()).bit_length() // 8))
    first, *more = (part.tobytes() for part in numbers.view(np.uint8).reshape(-1, _WIDTH_MOST)[:, :width].T)
    return [bytes([width]) + first, *more]


def _compressed(parts: Sequence[bytes]) -> bytes:
    """Return one zlib stream with separate codes for each part."""
    if sum(map(len, parts)) <= _PLAIN_MOST:
        return zlib.compress(b"".join(parts), 0)
    deflate = zlib.compressobj(9, strategy=zlib.Z_RLE)  # distant repetitions are accidental
    packed = [deflate.compress(part) + deflate.flush(zlib.Z_BLOCK) for part in parts]
    return b"".join([*packed, deflate.flush()])
