"""How a stream that is iterated by itself finds the loader, which lies above it: the package says so here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol


class Loads(Protocol):
    """A loader."""

    def __iter__(self) -> Iterator[object]: ...

    def __aiter__(self) -> AsyncIterator[object]: ...


_makers: list[Callable[[Any], Loads]] = []


def made_by(maker: Callable[[Any], Loads]) -> None:
    """Have `maker` make the loaders of streams that are iterated by themselves."""
    _makers[:] = [maker]


def loader_of(stream: object) -> Loads:
    """A loader of single samples, as they are."""
    return _makers[0](stream)
