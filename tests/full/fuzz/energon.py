"""Energon's offsets: what comes over any of them are members of the archive, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from end_to_end.energon import index
from end_to_end.tars import tar
from full.fuzz.dice import Dice, edited

from headrace._util.reads import Span
from headrace.errors import FormatError
from headrace.formats.energon import ENERGON
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import Limits

LIMITS = Limits(member_bytes=100_000)
URL = "memory://fuzz/0.tar"
BODIES = [(f"{n}", {"a": bytes([n + 1]) * 3, "b": bytes([n + 101]) * 600}) for n in range(3)]
ARCHIVE = tar(BODIES)
INDEX = index(ARCHIVE)
RIGHT = [fields for _, fields in BODIES]


class _Two:
    """An archive, and the index beside it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    async def read_into(self, url: str, start: int, target: memoryview, **how: object) -> Span:
        data = self._files[url]
        some = data[start : start + len(target)]
        target[: len(some)] = some
        return Span(start, start + len(some), len(data), None)


def seeds() -> Iterator[bytes]:
    yield from (b"", b"\1\2\3\4\5\6\7\x08", b"\0\x80\xff\4\1\xf0\x20\2", bytes(range(16)))


def check(data: bytes) -> None:
    dice = Dice(data)
    said, _ = edited(INDEX, dice, 1 + dice.number(3))
    reads = _Two({URL: ARCHIVE, URL + ".idx": said})
    try:
        rows = asyncio.run(ENERGON.index(reads, ShardEntry(URL), LIMITS)).rows  # type: ignore[arg-type]
    except FormatError:
        return
    places = list(zip(rows.offset.tolist(), rows.size.tolist(), strict=True))
    samples = []
    refused = 0
    for k in range(len(rows)):
        parts = [ARCHIVE[at : at + size] for at, size in places[2 * k : 2 * k + 2]]
        try:
            samples += ENERGON.open_block(Block(URL, rows.fields, LIMITS), parts)
        except ValueError:
            refused += 1
    bodies = {body for fields in RIGHT for body in fields.values()}
    assert all(body in bodies for sample in samples for body in sample.values())
    assert refused or samples == RIGHT, "no epoch over other offsets ends without an error"
