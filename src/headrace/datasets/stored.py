"""Sources whose samples lie in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.datasets.source import SampleSource


class StoredSource(SampleSource):
    """What lies in a store: shards, or single objects."""

    @property
    def urls(self) -> Sequence[str]:
        urls: Sequence[str] = self.data.urls
        return urls

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        options: Mapping[str, object] | None = self.data.storage_options
        return options
