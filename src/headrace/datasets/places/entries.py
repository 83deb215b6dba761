"""Addresses that were listed, each with what the listing told of its object's version, as a few flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np

from headrace.datasets.packed import Packed, packed
from headrace.errors import not_as_listed
from headrace.protocols import Version
from headrace.types import Ints, Listed

if TYPE_CHECKING:
    from headrace.datasets.places.kinds import Survey

_CHUNK = 2**14
UNKNOWN = -1
"""The size of an object of which the listing did not tell it."""


class Entries(Sequence[str]):
    """Addresses; what was told of each is asked for by its number.

    Args:
        names: the addresses.
        sizes: of the objects, in bytes; `UNKNOWN` where it was not told; None: of none.
        etags: of the objects; empty where it was not told; None: of none.
        start: where the paths in what was listed begin in the names, in bytes.

    Attributes:
        revision: what was listed, where it lies at a revision that was found to be that; else empty.
    """

    def __init__(
        self, names: Packed[str], sizes: Ints | None = None, etags: Packed[str] | None = None, start: int = 0
    ) -> None:
        self.names, self.sizes, self.etags, self.start = names, sizes, etags, start
        self.revision = ""

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Packed[str]: ...
    def __getitem__(self, index: int | slice) -> str | Packed[str]:
        return self.names[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __eq__(self, other: object) -> bool:
        return self.names == (other.names if isinstance(other, Entries) else other)

    __hash__ = None  # type: ignore[assignment]  # as that of a list

    def version(self, number: int) -> Version | None:
        """What was told of an object; None: nothing."""
        size = UNKNOWN if self.sizes is None else int(self.sizes[number])
        etag = "" if self.etags is None else self.etags[number]
        if size == UNKNOWN and not etag:
            return None
        return Version(None if size == UNKNOWN else size, etag or None, "listed")

    @cached_property
    def survey(self) -> Survey:
        """What the names have."""
        from headrace.datasets.places.survey import surveyed

        return surveyed(self.names, self.start)

    def listed(self) -> Iterator[Listed]:
        """Each with what was told of it."""
        for start in range(0, len(self), _CHUNK):
            names = self.names[start : start + _CHUNK]
            sizes = [UNKNOWN] * len(names) if self.sizes is None else self.sizes[start : start + _CHUNK].tolist()
            etags = [""] * len(names) if self.etags is None else self.etags[start : start + _CHUNK]
            for name, size, etag in zip(names, sizes, etags, strict=True):
                yield Listed(name, None if size == UNKNOWN else size, etag or None)


def entries_of(objects: Iterable[Listed], start: int = 0) -> Entries:
    """Objects that fit into memory, as they come."""
    sizes: list[int] = []
    etags: list[str] = []

    def names() -> Iterator[str]:
        for name, size, etag in objects:
            sizes.append(UNKNOWN if size is None else size)
            etags.append(etag or "")
            yield name

    all_names = packed(names())
    known = np.array(sizes, np.int64)
    told = known if (known != UNKNOWN).any() else None
    return Entries(all_names, told, packed(etags) if any(etags) else None, start)


def listed_of(urls: Sequence[str]) -> Iterator[Listed]:
    """Addresses with what is known of them, which is nothing where they were not listed."""
    return urls.listed() if isinstance(urls, Entries) else map(Listed, urls)


def version_at(urls: Sequence[str], number: int) -> Version | None:
    """What a listing told of one of some addresses; None: nothing, or they were not listed."""
    return urls.version(number) if isinstance(urls, Entries) else None


def check_listed(urls: Sequence[str], number: int, size: int | None, etag: str | None) -> None:
    """See that an object that was read is of the version that was listed, where it was listed.

    Args:
        size: the object's, as it was read; None or below 0: not known.
        etag: the same; None: it has none, or none that was seen.

    Raises:
        ObjectChangedError: it is another.
    """
    listed = version_at(urls, number) or Version()
    if size is not None and size >= 0 and listed.size not in (None, size):
        raise not_as_listed(urls[number], f"it had {listed.size} bytes then, and has {size}")
    if etag is not None and listed.etag not in (None, etag):
        raise not_as_listed(urls[number], f"its ETag was {listed.etag}, now {etag}")


def survey_of(urls: Sequence[str]) -> Survey:
    """What some addresses have."""
    from headrace.datasets.places.kinds import path_in
    from headrace.datasets.places.survey import surveyed

    entries = urls if isinstance(urls, Entries) else None
    if not any(url.startswith(("http://", "https://")) for url in urls[:1]):
        return surveyed(packed(urls), 0) if entries is None else entries.survey
    return surveyed(packed(map(path_in, urls)), 0 if entries is None else entries.start)


def only(urls: Sequence[str], is_wanted: Callable[[str], bool]) -> Entries:
    """Those of some addresses that are wanted, as compact as they were."""
    some = entries_of((one for one in listed_of(urls) if is_wanted(one.path)), getattr(urls, "start", 0))
    some.revision = getattr(urls, "revision", "")
    return some
