"""Single objects as samples."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from urllib.parse import urlsplit

from headrace._util import check
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.source import SampleSource, StoredSource, Traits
from headrace.errors import OptionError, masked
from headrace.sources.discovery.entries import version_at
from headrace.sources.reading import read_from
from headrace.types import Ints

Facts = tuple[tuple[str, str], ...]
"""Facts about a location: (subject, fact)."""

_SHOWN = 5


def classes_of(found: set[str], given: Sequence[str] | None, place: str) -> tuple[str, ...]:
    """Return the classes in the order of their numbers: as given, or sorted."""
    if given is None:
        return tuple(sorted(found))
    classes = tuple(given)
    if isinstance(given, str) or len(set(classes)) < len(classes):
        raise check.invalid("classes", given, "a list of different names")
    if missing := sorted(found - set(classes)):
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        raise OptionError.at(
            place, f"has classes that classes= does not list: {shown}. Add them, or drop their samples"
        )
    return classes


def digest_with(digest: str | None, classes: Sequence[str] | None) -> str | None:
    if digest is None or classes is None:
        return digest
    return blake2b(repr((digest, classes)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Objects(AsyncDataset):
    """Samples that are objects of their own in a store, each read by one or a few requests."""

    def __init__(
        self, urls: Sequence[str], storage_options: Mapping[str, object] | None = None, facts: Facts = ()
    ) -> None:
        self.urls, self.storage_options, self.facts = urls, storage_options, facts

    def __len__(self) -> int:
        return len(self.urls)

    def digest(self) -> str | None:
        """Return a digest of the samples. None: the names of the objects suffice."""
        return None

    async def body(self, number: int) -> bytes:
        """Read an object, in the version that was listed, if known."""
        return await read_from(self.storage_options, self.urls[number], version=version_at(self.urls, number))

    def __sample_source__(self) -> SampleSource:
        return ObjectSource(self)


class Files(Objects):
    """One sample per object: a dict with `__key__`, `__url__` and the bytes under the extension."""

    async def aget(self, key: int) -> dict[str, object]:
        url = self.urls[key]
        name, _, extension = posixpath.basename(urlsplit(url).path).partition(".")
        return {
            "__key__": name,
            "__url__": masked(url),
            extension.lower() or "data": await self.body(key),
        }


class ObjectSource(StoredSource, KeySource):
    data: Objects
    traits = Traits(numbered=True, objects=True)

    @property
    def facts(self) -> list[tuple[str, str]]:
        return [("objects", f"{len(self.urls):,}, read by themselves"), *self.data.facts]

    def fingerprint_with(self, sizes: Ints) -> str:
        digest = self.data.digest()
        if digest is not None and sizes.tolist() == [len(self.data)]:
            return digest
        return super().fingerprint_with(sizes)
