"""Energon's offsets: what comes over any of them are members of the archive, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from end_to_end.energon import index
from end_to_end.tars import tar
from full.fuzz.dice import Dice, edited, starts
from one_object import OneObject

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


def seeds() -> Iterator[bytes]:
    yield from starts()


def check(data: bytes) -> None:
    dice = Dice(data)
    said, _ = edited(INDEX, dice, 1 + dice.number(3))
    reads = OneObject({URL: ARCHIVE, URL + ".idx": said})
    try:
        rows = asyncio.run(ENERGON.index(reads, ShardEntry(URL), LIMITS)).rows
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
