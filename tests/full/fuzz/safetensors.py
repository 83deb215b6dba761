"""Safetensors: what is read of a file are tensors of its bytes, or FormatError, or ValueError."""

from __future__ import annotations

import asyncio
from functools import partial

import torch
from builders.tensor_files import whole
from full.fuzz.dice import Dice, edited, starts
from one_object import OneObject

from headrace.errors import FormatError
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.safetensors import SafeTensors

LIMITS = Limits(member_bytes=4000, header_bytes=2000)
URL = "memory://fuzz/0.safetensors"
HEADER = {
    "__metadata__": {"a": "b"},
    "f": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
    "h": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
    "z": {"dtype": "U8", "shape": [3, 0], "data_offsets": [30, 30]},
}
WHOLE = whole(HEADER, bytes(range(30)))
seeds = partial(starts, 2)


def check(data: bytes) -> None:
    dice = Dice(data)
    form = SafeTensors(rows=bool(dice.number(255) % 2))
    file = edited(WHOLE, dice, 1 + dice.number(3))
    try:
        rows = asyncio.run(form.index(OneObject(file, most_bytes=2**16), ShardEntry(URL), LIMITS)).rows
        samples = form.open_block(Block("u", rows.fields, LIMITS), [file])
    except (FormatError, ValueError):
        return
    assert len(samples) == len(rows) or not len(rows)
    nbytes = 0
    for k in range(len(rows)):
        for value in samples[k].values():
            assert isinstance(value, torch.Tensor)
            nbytes += value.numel() * value.itemsize
    assert nbytes <= len(file)
