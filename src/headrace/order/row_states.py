"""Progress of documents that are packed in rows, and its JSON, as specified in `docs/reference/state.md`.

A packed row is a row of the global batch. Its sequences are made of the documents at the row's own positions.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from headrace.types import Ints

_ROWS_MOST = 2**20
_BYTES_MOST = 2**27  # decompressed
_WIDTH_MOST = 8  # bytes per number
_PLAIN_MOST = 512  # bytes; stored uncompressed, so that all zlib versions write the same
_OWN = 5  # columns before those of inputs


class InputCursor(NamedTuple):
    """Progress of a row in an input: number of positions drawn, and tokens of their documents."""

    round: int = 0
    tokens: int = 0


class RowCursor(NamedTuple):
    """The resume point of a packed row.

    Attributes:
        round: Index among the row's positions: the first document to come is at this one or a later one.
        part: Number of documents of that position that are consumed.
        offset: Number of consumed tokens of the first document.
        taken: Consumed documents among those after the first: a bit for each, from the lowest on.
        inputs: For a mixture by tokens: progress in each input before that position was drawn. Else empty.
        check: Checksum, one byte, of the documents that `part`, `offset` and `taken` refer to. In a mixture by tokens,
            others may be drawn if a document's length has changed.
    """

    round: int = 0
    part: int = 0
    offset: int = 0
    taken: int = 0
    inputs: tuple[InputCursor, ...] = ()
    check: int = 0

    @property
    def drawn(self) -> int:
        """Number of the row's positions that are consumed at least in part."""
        return self.round + bool(self.part or self.offset or self.taken)


class RowProgress(NamedTuple):
    """Progress of several packed rows.

    Attributes:
        turn: Number of turns so far. Rows emit one sequence each in round-robin order. Exhausted rows keep their turn.
        tokens: For a mixture by tokens: tokens emitted per input, in all these rows. Else empty.
    """

    turn: int
    cursors: tuple[RowCursor, ...]
    tokens: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Encode the progress as JSON.

        Numbers are stored by column, and by byte within a column: first the lowest bytes of all rows, then the next
        ones. Each such string is compressed separately. The lowest bytes of token counts are almost random; the higher
        ones are nearly constant.
        """
        taken = [cursor.taken.to_bytes(-(-cursor.taken.bit_length() // 8), "little") for cursor in self.cursors]
        table = np.array(
            [
                (own.round, own.part, own.offset, len(some), own.check, *chain(*own.inputs))
                for own, some in zip(self.cursors, taken, strict=True)
            ],
            np.int64,
        )
        lowest = table.min(axis=0)
        packed: dict[str, object] = {"turn": self.turn, "count": len(taken), "round": int(lowest[0])}
        if self.tokens:
            packed |= {"tokens": list(self.tokens), "inputs": lowest[_OWN:].reshape(-1, 2).tolist()}
            table[:, 0] = lowest[0]  # a row's round is the sum of those of its inputs
        lowest[1:_OWN] = 0
        data = [part for column in (table - lowest).T for part in _by_bytes(column)]
        return {**packed, "cursors": base64.b85encode(_compressed([*data, b"".join(taken)])).decode()}

    @staticmethod
    def from_json(packed: Mapping[str, Any]) -> RowProgress:
        """Decode the result of `to_json`. Raises ValueError if the input is invalid."""
        turn, count, lowest = (int(packed[name]) for name in ("turn", "count", "round"))
        if not 1 <= count <= _ROWS_MOST or min(turn, lowest) < 0:
            raise ValueError("rows must be some, and not be before the begin")
        try:
            unzip = zlib.decompressobj()
            data = unzip.decompress(base64.b85decode(packed["cursors"]), _BYTES_MOST)
        except zlib.error as error:
            raise ValueError(f"rows cannot be unpacked: {error}") from error
        least = [int(number) for some in packed.get("inputs", ()) for number in some]
        tokens = tuple(map(int, packed.get("tokens", ())))
        if 2 * len(tokens) != len(least) or min((*tokens, *least), default=0) < 0:
            raise ValueError("inputs of rows make no sense")
        columns = list[list[int]]()
        for _ in range(_OWN + len(least)):
            width = data[0] if data else 0
            if not 1 <= width <= _WIDTH_MOST or len(data) < 1 + width * count:
                raise ValueError("rows are cut off")
            numbers = np.zeros((count, _WIDTH_MOST), np.uint8)
            numbers[:, :width] = np.frombuffer(data, np.uint8, width * count, 1).reshape(width, count).T
            columns.append(numbers.view("<u8")[:, 0].tolist())
            data = data[1 + width * count :]
        if len(data) != sum(columns[3]) or not unzip.eof:
            raise ValueError("rows are cut off, or too many")
        of_inputs = [[low + more for more in column] for low, column in zip(least, columns[_OWN:], strict=True)]
        cursors, at = list[RowCursor](), 0
        for row, (round_, part, offset, size, check) in enumerate(zip(*columns[:_OWN], strict=True)):
            inputs = tuple(InputCursor(a[row], b[row]) for a, b in zip(of_inputs[::2], of_inputs[1::2], strict=True))
            whole = sum(cursor.round for cursor in inputs) if inputs else lowest + round_
            taken = int.from_bytes(data[at : at + size], "little")
            cursors.append(RowCursor(whole, part, offset, taken, inputs, check))
            at += size
        return RowProgress(turn, tuple(cursors), tokens)

    @staticmethod
    def joined(ranks: Sequence[RowProgress | None]) -> RowProgress | None:
        """Combine the progress of consecutive ranks. None: at the start.

        Raises:
            ValueError: The ranks are at different steps.
        """
        known = [one for one in ranks if one is not None]
        steps = {divmod(one.turn, len(one.cursors)) for one in known}
        if not steps:
            return None
        if len(known) < len(ranks) or len(steps) > 1 or any(rest for _, rest in steps):
            raise ValueError(f"they are after different steps: {sorted(steps)}")
        ((step, _),) = steps
        cursors = tuple(cursor for one in known for cursor in one.cursors)
        tokens = tuple(map(sum, zip(*(one.tokens for one in known), strict=True)))
        return RowProgress(step * len(cursors), cursors, tokens)

    def part(self, rows: range) -> RowProgress:
        """Return the progress of some rows. Raises ValueError if rows are within a step, or there are fewer."""
        step, rest = divmod(self.turn, len(self.cursors))
        if len(rows) == len(self.cursors):
            return self
        if rest or rows.stop > len(self.cursors):
            raise ValueError("it is in the middle of a step, or of fewer rows")
        # Token totals of all rows stay with the first part, so that `joined` restores the sum.
        tokens = self.tokens if rows.start == 0 else (0,) * len(self.tokens)
        return RowProgress(step * len(rows), self.cursors[rows.start : rows.stop], tokens)


def _by_bytes(column: Ints) -> list[bytes]:
    """Split numbers by byte. The first part starts with the number of bytes."""
    width = max(1, -(-int(column.max()).bit_length() // 8))
    split = np.ascontiguousarray(column, "<u8").view(np.uint8).reshape(-1, _WIDTH_MOST)
    first, *more = (part.tobytes() for part in split[:, :width].T)
    return [bytes([width]) + first, *more]


def _compressed(parts: Sequence[bytes]) -> bytes:
    """Return one zlib stream with separate codes for each part."""
    if sum(map(len, parts)) <= _PLAIN_MOST:
        return zlib.compress(b"".join(parts), 0)
    deflate = zlib.compressobj(9, strategy=zlib.Z_RLE)  # distant repetitions are accidental
    packed = [deflate.compress(part) + deflate.flush(zlib.Z_BLOCK) for part in parts]
    return b"".join([*packed, deflate.flush()])
