"""What `.pack()` is asked for, and how a data set finds what does it, which lies above it: the package says so here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """The arguments of `.pack()`, as they were given."""

    length: int
    tokens: str
    method: str
    document_ids: bool
    lengths: ArrayLike | None
    fields: Sequence[str]
    pad_value: float | Mapping[str, float]


Packs = Callable[[object, Packing], object]
"""Gives, of a data set, the stream of its documents' sequences."""

_makers: list[Packs] = []


def packed_by(maker: Packs) -> None:
    """Have `maker` make what `.pack()` gives."""
    _makers[:] = [maker]


def packed_stream_of(data: object, packing: Packing) -> object:
    """What `.pack()` gives."""
    return _makers[0](data, packing)
