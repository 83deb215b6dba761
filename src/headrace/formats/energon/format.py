"""Energon's folders as a format: a sample is all that lies between two offsets, and the header behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from headrace.errors import FormatError
from headrace.formats.energon import catalogue
from headrace.formats.energon.offsets import index_of, offsets_in
from headrace.formats.format import Block, Catalogue, Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import BLOCK, key_of, read_header
from headrace.formats.tar.scanner import TarScanner
from headrace.protocols import Reads
from headrace.rows import Rows

_END_MARK = bytes(2 * BLOCK)
_REGULAR = (b"0", b"\0", b"7")


class Energon(Format):
    """A folder with `.nv-meta`, or single shards with their `.tar.idx` beside them.

    Args:
        split: which of the folder's.
    """

    name = "energon"
    suffixes = ()
    catalogue: ClassVar[str | None] = catalogue.NAME

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def sniff(self, name: str, head: bytes) -> float:
        return 0.9 if name == catalogue.NAME and b"split_parts" in head else 0.0

    def catalogued(
        self,
        url: str,
        data: bytes,
        limits: Limits,  # noqa: ARG002
        others: Callable[[str], bytes | None],
    ) -> Catalogue:
        return catalogue.catalogued(url, data, self.split, others)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        offsets, span = await offsets_in(reads, shard, limits)
        count = len(offsets) - 1
        rows = Rows(
            np.arange(count).astype(f"S{len(str(max(count - 1, 0)))}"),
            np.arange(count + 1) * 2,
            np.tile(np.arange(2, dtype=np.int32), count),
            np.repeat(offsets, 2)[1:-1],
            np.stack([np.diff(offsets), np.full(count, BLOCK)], 1).reshape(-1),
            ("members", "behind"),
        )
        return ShardIndex(rows, None, span.size, span.etag)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        data, behind = bodies
        scanner = TarScanner(block.url, block.limits)
        begun = scanner.feed(memoryview(data), 0, last=False)
        is_one = not len(begun) and scanner.next_header == len(data)
        rows = scanner.feed(_END_MARK, len(data), last=True) if is_one and not scanner.done else begun
        index = index_of(block.url).rpartition("/")[2]
        if scanner.error is not None:
            why = str(scanner.error.args[0]).rpartition(" (")[0]
            raise ValueError(f"of the bytes that {index} says at {scanner.error.offset}: {why}")
        if not is_one or len(rows) != 1 or _goes_on(rows.keys[0].item(), behind):
            raise ValueError(
                f"its bytes by {index} are not one sample, all of it: that is the index of another archive"
            )
        places = zip(rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        return [{rows.fields[field]: data[at : at + size] for field, at, size in places}]


def _goes_on(key: bytes, behind: bytes) -> bool:
    """Whether the header behind a sample is none, or that of another of its members.

    So no epoch over offsets that do not fit ends without an error: where one sample has been cut off its first members,
    another has them at its end.
    """
    if not any(behind):
        return False  # the end mark
    try:
        header = read_header(behind, BLOCK)
    except FormatError:
        return True
    return header.kind in _REGULAR and key_of(header.name) == key.decode("utf-8", "surrogateescape")


ENERGON = Energon()
