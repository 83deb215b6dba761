"""How a stream that is iterated by itself finds the loader, which lies above it: the package says so here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol


class Loads(Protocol):
    """A loader."""

    def __iter__(self) -> Iterator[object]: ...

    def __aiter__(self) -> AsyncIterator[object]: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...

    async def aclose(self) -> None: ...


_makers: list[Callable[..., Loads]] = []


def made_by(maker: Callable[..., Loads]) -> None:
    """Have `maker` make the loaders of streams that are iterated by themselves."""
    _makers[:] = [maker]


def loader_of(stream: object, **options: Any) -> Loads:
    """A loader of single samples, as they are.

    Args:
        stream: what it iterates over.
        **options: of the loader.
    """
    return _makers[0](stream, **options)
