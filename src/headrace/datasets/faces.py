"""What sources see of data sets, and of the streams that they are of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, Protocol

from headrace.datasets.sharing import RanksBy
from headrace.protocols import Opens
from headrace.types import Ints

Parts = Callable[[Ints, Ints, Ints], Awaitable[Sequence[object]]]
"""Gets, of samples with these numbers, what they would be if they had the tokens [starts, stops) alone."""


class HasKeys(Protocol):
    """Has a key for each number."""

    def __getitem__(self, number: int, /) -> object: ...


class KeyedData(Protocol):
    """A data set whose samples are got by keys."""

    def __len__(self) -> int: ...

    def keys(self) -> Sequence[object]: ...


class IteratedData(Opens, Protocol):
    """A data set that is iterated over."""

    loop: Literal["engine", "caller"]
    ranks_by: RanksBy | None

    def aiter(self) -> AsyncIterator[object]: ...


class Described(Protocol):
    """A stream, as far as those are concerned that it is an input of."""

    def describe(self, samples: int = 0) -> str: ...
