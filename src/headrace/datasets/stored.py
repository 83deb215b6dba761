"""Base class of sources that read from a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.datasets.source import SampleSource


class StoredSource(SampleSource):
    """Shards or objects in a store."""

    @property
    def urls(self) -> Sequence[str]:
        urls: Sequence[str] = self.data.urls
        return urls

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        options: Mapping[str, object] | None = self.data.storage_options
        return options
