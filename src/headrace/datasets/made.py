"""Base classes of data sets whose samples are made of those of another source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.source import SampleSource, Traits, Wanted


class MadeDataset(AsyncDataset):
    """Numbered samples made of those of another source, which opens and closes with this."""

    @property
    def inner(self) -> SampleSource:
        raise NotImplementedError

    async def original(self, number: int, wanted: Wanted | None) -> object:
        return await self.inner.at(number if self._keys is None else self._keys[number], wanted)

    async def aopen(self) -> None:
        if self.inner.opens is not None:
            await self.inner.opens.aopen()

    async def aclose(self) -> None:
        if self.inner.opens is not None:
            await self.inner.opens.aclose()

    @cached_property
    def _keys(self) -> Sequence[object] | None:
        """Keys of the inner samples. None: they are fetched by number."""
        traits = self.inner.traits
        return None if traits.sharded or traits.by_number else self.inner.keys()


class MadeSource(KeySource):
    traits = Traits(numbered=True, by_number=True)

    def __init__(self, data: MadeDataset) -> None:
        super().__init__(data)
        self._inner = data.inner

    @property
    def facts(self) -> list[tuple[str, str]]:
        return self._inner.facts

    @property
    def has_count(self) -> bool:
        return self._inner.has_count

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        return self._inner.storage_options

    @property
    def has_store(self) -> bool:
        return self._inner.has_store

    @property
    def objects(self) -> Sequence[SampleSource]:
        return self._inner.objects
