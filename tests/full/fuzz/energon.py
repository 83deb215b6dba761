"""Energon's offsets: what comes over any of them are members of the archive, or an error."""

from __future__ import annotations

from builders.energon import index
from builders.tars import tar
from full.fuzz.dice import Dice, edited, starts
from full.fuzz.samples import samples_of, table_of

from headrace.formats.energon import ENERGON
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits

LIMITS = Limits(member_bytes=100_000)
URL = "memory://fuzz/0.tar"
BODIES = [(f"{n}", {"a": bytes([n + 1]) * 3, "b": bytes([n + 101]) * 600}) for n in range(3)]
ARCHIVE = tar(BODIES)
INDEX = index(ARCHIVE)
RIGHT = [fields for _, fields in BODIES]
seeds = starts


def check(data: bytes) -> None:
    dice = Dice(data)
    changed = edited(INDEX, dice, 1 + dice.number(3))
    rows = table_of(ENERGON, {URL: ARCHIVE, URL + ".idx": changed}, ShardEntry(URL), LIMITS)
    if rows is not None:
        samples = list(samples_of(ENERGON, rows, ARCHIVE, LIMITS))
        bodies = {body for fields in RIGHT for body in fields.values()}
        assert all(body in bodies for sample in samples for body in sample.values())
        assert len(samples) < len(rows) or samples == RIGHT, "no epoch over other offsets ends without an error"
