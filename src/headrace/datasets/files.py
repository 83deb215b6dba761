"""Single objects as samples."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from urllib.parse import urlsplit

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.source import SampleSource, StoredSource, Traits
from headrace.errors import masked
from headrace.reading import read


class Files(AsyncDataset):
    """One sample for each object: a dict with `__key__`, `__url__` and the object's bytes under its extension."""

    def __init__(self, urls: tuple[str, ...], storage_options: Mapping[str, object] | None = None) -> None:
        self.urls, self.storage_options = urls, storage_options

    def __len__(self) -> int:
        return len(self.urls)

    async def aget(self, key: int) -> dict[str, object]:
        url = self.urls[key]
        name, _, extension = posixpath.basename(urlsplit(url).path).partition(".")
        return {"__key__": name, "__url__": masked(url), extension.lower() or "data": await read(url)}

    def __sample_source__(self) -> SampleSource:
        return FileSource(self)


class FileSource(StoredSource, KeySource):
    """Objects, read by the loader's own reader."""

    traits = Traits(numbered=True, objects=True)
