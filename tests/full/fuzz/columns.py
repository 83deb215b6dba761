"""Fields of many samples decoded at once: the same values as one by one, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from builders.numbers import npy
from builders.rows import laid_out
from full.fuzz.dice import Dice, edited

from headrace.errors import DecodeError
from headrace.formats.decoders import ColumnDecoder, decoder

DTYPES = ("<f4", ">f4", "u1", "<i8", "?", "<c8", "<U3", "<M8[s]", [("a", "<i4"), ("b", "u1")])
SHAPES = ((), (1,), (3,), (2, 3), (0,), (300,))
NUMBERS = (b"7", b"12", b"007", b" 7", b"-1", b"9" * 18, b"9" * 19, b"1_0", b"", b"/", b":", b"\xff")
NAMES = (("npy", "cls"), ("cls;npy",), ("a.npy", "b.id"), ("cls", "cls"), ("png;cls",))


def seeds() -> Iterator[bytes]:
    yield from (bytes([k, k % 7, k % 9, k % 5, k % 19, k % 23, k, k]) + bytes(range(k)) for k in range(200))


def check(data: bytes) -> None:
    dice = Dice(data)
    names = dice.one_of(NAMES)
    samples = _samples(dice, names)
    rows, bodies = laid_out(samples, [dice.number(2000) for _ in range(dice.number(3))])
    decode = decoder().only([one for name in names for one in name.split(";")])  # as the loader has it
    columns = ColumnDecoder(decode, names)(rows, bodies)
    try:
        decoded = [decode(dict(sample)) for sample in samples]
    except DecodeError:
        assert columns is None, "one sample alone gives the better error"
        return
    for k, name in enumerate(names if columns is not None else ()):
        assert columns is not None
        column = columns[k]
        field = next(one for one in name.split(";") if one in samples[0])
        target = bytearray(len(samples) * column.dtype.itemsize * int(np.prod(column.shape)))
        column.write(bodies, memoryview(target))
        got = np.frombuffer(target, column.dtype).reshape(-1, *column.shape)
        for at, sample in enumerate(decoded):
            assert column.is_number == isinstance(sample[field], int)
            wanted = np.asarray(sample[field])
            assert (wanted.dtype, wanted.shape) == (column.dtype, column.shape)
            assert got[at : at + 1].tobytes() == wanted.tobytes()


def _samples(dice: Dice, names: Sequence[str]) -> list[dict[str, bytes]]:
    fields = list(dict.fromkeys(one for name in names for one in name.split(";")))
    fields = fields[dice.number(2) // 2 :] or fields
    dtype, shape = dice.one_of(DTYPES), dice.one_of(SHAPES)
    order = "F" if dice.number(7) == 7 else "C"
    count, odd = dice.number(20) + 1, dice.number(30)
    samples = []
    for k in range(count):
        numbers = (np.arange(int(np.prod(shape))).reshape(shape) + dice.number(255)) % 100
        array = np.zeros(shape, dtype) if isinstance(dtype, list) else np.asarray(numbers, dtype, order=order)
        number = dice.one_of(NUMBERS) if k == odd // 2 else b"%d" % dice.number(1000)
        sample = {field: npy(array) if field.endswith("npy") else number for field in fields}
        if k == odd:
            field = dice.one_of(fields)
            sample[field] = edited(sample[field], dice, 2)
            if len(sample) > 1 and dice.number(3) == 3:
                del sample[field]
        samples.append(sample)
    return samples
