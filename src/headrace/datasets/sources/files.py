"""Single objects as samples."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.places.entries import version_at
from headrace.datasets.source import SampleSource, Traits
from headrace.datasets.stored import StoredSource
from headrace.errors import masked
from headrace.reading import read_from
from headrace.types import Ints

Facts = tuple[tuple[str, str], ...]


class Objects(AsyncDataset):
    """Samples that are objects of their own in a store, each got by one request, or a few.

    Args:
        urls: the objects.
        storage_options: for the store.
        facts: what is said of them, and why.
    """

    def __init__(
        self, urls: Sequence[str], storage_options: Mapping[str, object] | None = None, facts: Facts = ()
    ) -> None:
        self.urls, self.storage_options, self.facts = urls, storage_options, facts

    def __len__(self) -> int:
        return len(self.urls)

    def digest(self) -> str | None:
        """What tells its objects from others, where that is known without a look at each."""
        digest: str | None = getattr(self.urls, "digest", None)  # a manifest has one
        return digest

    async def body(self, number: int) -> bytes:
        """The bytes of one of the objects: of the version that was listed, where it was."""
        return await read_from(self.storage_options, self.urls[number], version=version_at(self.urls, number))

    def __sample_source__(self) -> SampleSource:
        return ObjectSource(self)


class Files(Objects):
    """One sample for each object: a dict with `__key__`, `__url__` and the object's bytes under its extension."""

    async def aget(self, key: int) -> dict[str, object]:
        url = self.urls[key]
        name, _, extension = posixpath.basename(urlsplit(url).path).partition(".")
        return {
            "__key__": name,
            "__url__": masked(url),
            extension.lower() or "data": await self.body(key),
        }


class ObjectSource(StoredSource, KeySource):
    """Objects, read by the loader's own reader."""

    traits = Traits(numbered=True, objects=True)

    def __init__(self, data: Objects) -> None:
        super().__init__(data)
        self.data: Objects = data

    @property
    def facts(self) -> list[tuple[str, str]]:
        return [("objects", f"{len(self.urls):,}, read by themselves"), *self.data.facts]

    def fingerprint_with(self, sizes: Ints) -> str:
        digest = self.data.digest()
        if digest is not None and sizes.tolist() == [len(self.data)]:
            return digest
        return super().fingerprint_with(sizes)
