"""Types of the parts of samples."""

from __future__ import annotations

import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import torch
from watching import Made, Note, compare, program, read, run

TORCHS = dict.fromkeys(value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype))
# Those of fewer bits than a byte torch's own loader cannot collate in workers, nor do they have values.
PLAIN = [kind for kind in TORCHS if not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(kind))]
NUMPYS = ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<f16", "<c8", "<c16"]
NUMPYS += ["S3", "U3", "<M8[s]", "<m8[ms]", "O"]


def of_dtype(kind: torch.dtype, shape: tuple[int, ...]) -> Callable[[int], Any]:
    def make(index: int) -> torch.Tensor:
        size = int(np.prod(shape)) * torch.empty(0, dtype=kind).element_size()
        raw = torch.arange(size, dtype=torch.int64).add(index).remainder(2 if kind is torch.bool else 251)
        return raw.to(torch.uint8).view(kind).reshape(shape)

    return make


@program
def tensors_of_every_dtype(loader: Any, note: Note) -> None:
    compare(loader, note, {str(kind): of_dtype(kind, (2, 8)) for kind in PLAIN})


@program
def large_tensors_of_every_dtype(loader: Any, note: Note) -> None:
    read(loader, note, Made({str(kind): of_dtype(kind, (40, 50)) for kind in PLAIN}), 2, workers=(2,))


@program
def tensors_that_are_quantized(loader: Any, note: Note) -> None:
    # Without workers: torch's loader cannot send them out of one.
    makers = {"quint8": lambda k: torch.quantize_per_tensor(torch.arange(4.0) + k, 0.5, 3, torch.quint8)}
    read(loader, note, Made(makers), None, workers=(0,))


def of_numpys(kind: str, shape: tuple[int, ...]) -> Callable[[int], Any]:
    return lambda index: (np.arange(6).reshape(shape) + index).astype(kind)


@program
def arrays_of_every_dtype(loader: Any, note: Note) -> None:
    compare(loader, note, {kind: of_numpys(kind, (2, 3)) for kind in NUMPYS})


@program
def scalars_of_numpy(loader: Any, note: Note) -> None:
    compare(loader, note, {kind: lambda k, kind=kind: of_numpys(kind, (6,))(k)[1] for kind in NUMPYS})


@program
def arrays_of_structures(loader: Any, note: Note) -> None:
    kind = np.dtype([("at", "<i4"), ("where", "<f4", (2,)), ("name", "S4")])
    makers = {
        "array": lambda k: np.array([(k, (1, 2), b"ab")], kind),
        "one of them": lambda k: np.array([(k, (1, 2), b"ab")], kind)[0],
        "record array": lambda k: np.rec.array([(k, 2.5)], dtype=[("x", "i4"), ("y", "f8")]),
        "aligned": lambda k: np.zeros(2, np.dtype([("a", "u1"), ("b", "<f8")], align=True)),
    }
    compare(loader, note, makers)


@program
def arrays_of_many_kinds(loader: Any, note: Note) -> None:
    def read_only(k: int) -> Any:
        array = np.arange(4) + k
        array.flags.writeable = False
        return array

    makers = {
        "masked": lambda k: np.ma.masked_array([1.0, 2.0 + k], [False, True]),
        "matrix": lambda k: np.asmatrix([[1, k], [3, 4]]),
        "in Fortran's order": lambda k: np.asfortranarray(np.arange(6).reshape(2, 3) + k),
        "every second": lambda k: (np.arange(10) + k)[::2],
        "of an array within it": lambda k: np.broadcast_to(np.float32(k), (2, 2)),
        "empty": lambda _: np.empty((0, 3), "f4"),
        "of no dimension": lambda k: np.array(k),
        "large": lambda k: np.full((50, 60), k, "f4"),
    }
    compare(loader, note, makers)
    uncommon = {"read only": read_only, "reversed": lambda k: np.arange(4)[::-1] * k}
    read(loader, note, Made(uncommon), 2, workers=(0,))


Colour = enum.Enum("Colour", "RED")
Number = enum.IntEnum("Number", "ONE TWO")
Metres = type("Metres", (float,), {})
Count = type("Count", (int,), {})


class Name(str):
    __slots__ = ("language",)


@program
def numbers_and_texts_of_python(loader: Any, note: Note) -> None:
    makers = {
        "int": lambda k: k,
        "large int": lambda k: 2**62 + k,
        "too large int": lambda k: 2**70 + k,
        "negative": lambda k: -k,
        "bool": lambda k: k % 2 == 0,
        "float": lambda k: k / 3,
        "not a number": lambda _: float("nan"),
        "infinite": lambda _: float("-inf"),
        "complex": lambda k: complex(k, 1),
        "text": lambda k: f"the {k}th ß \U0001f600",
        "text with a zero": lambda k: f"a\0{k}",
        "bytes": lambda k: bytes([k, 0, 255]),
        "byte array": lambda k: bytearray([k]),
        "none": lambda _: None,
        "ellipsis": lambda _: ...,
        "enum": lambda _: Colour.RED,
        "int enum": lambda _: Number.TWO,
        "float of one's own": lambda k: Metres(k),
        "int of one's own": lambda k: Count(k),
        "text of one's own": lambda k: Name(k),
        "int, then bool": lambda k: k if k % 2 else True,
        "int, then float": lambda k: k / 2 if k % 2 else k,
        "float, then int": lambda k: k if k % 2 else k / 2,
        "int, then text": lambda k: "a" if k % 2 else k,
        "text, then int": lambda k: k if k % 2 else "a",
        "int, then none": lambda k: None if k % 2 else k,
        "int of too many bits": lambda k: 2**63 + k,
        "a lone surrogate": lambda _: "\ud800",
    }
    compare(loader, note, makers)


@program
def objects_of_the_standard_library(loader: Any, note: Note) -> None:
    makers = {
        "decimal": lambda k: decimal.Decimal(k) / 7,
        "fraction": lambda k: fractions.Fraction(k, 7),
        "path": lambda k: pathlib.Path("a") / str(k),
        "time": lambda k: datetime(2020, 1, 1 + k % 28, tzinfo=UTC),
        "span": lambda k: timedelta(seconds=k),
        "identifier": lambda k: uuid.UUID(int=k),
        "address": lambda k: ipaddress.ip_address(k),
        "set": lambda k: {k, 1},
        "frozen set": lambda k: frozenset({k}),
        "slice": lambda k: slice(k, 2),
        "type": lambda _: dict,
        "function": lambda _: len,
        "dtype": lambda _: torch.float16,
        "size": lambda k: torch.Size([k, 2]),
        "device": lambda _: torch.device("cpu"),
        "dtype of numpy": lambda _: np.dtype("f4"),
    }
    compare(loader, note, makers)


if __name__ == "__main__":
    run()
