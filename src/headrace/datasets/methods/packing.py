"""The arguments of `.pack()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    length: int
    tokens: str
    method: str
    document_ids: bool
    lengths: ArrayLike | None
    fields: Sequence[str]
    pad_value: float | Mapping[str, float]
