"""Protocols of data sets and streams, as sources see them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, Protocol

from headrace._util.reads import Opens
from headrace.dataset.rank_info import RanksBy
from headrace.types import Ints

Parts = Callable[[Ints, Ints, Ints], Awaitable[Sequence[object]]]
"""Reads tokens [starts[i], stops[i]) of sample numbers[i], in the form of whole samples."""


class HasKeys(Protocol):
    def __getitem__(self, number: int, /) -> object: ...


class KeyedData(Protocol):
    def __len__(self) -> int: ...

    def keys(self) -> Sequence[object]: ...


class IteratedData(Opens, Protocol):
    loop: Literal["engine", "caller"]
    ranks_by: RanksBy | None

    def aiter(self) -> AsyncIterator[object]: ...
