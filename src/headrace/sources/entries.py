"""Listings of folders and patterns: sorted addresses with the versions of their objects, in a few flat arrays."""

from __future__ import annotations

import asyncio
import json
import operator
import re
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from zipfile import BadZipFile

import numpy as np

from headrace._util.reads import Version
from headrace.dataset.compact import Packed, packed
from headrace.dataset.source import blocking
from headrace.errors import AccessDeniedError, FormatError, ObjectMissingError, StorageError, masked
from headrace.sources.reading import Options, as_listed, listed, pinned
from headrace.types import Ints, Listed

if TYPE_CHECKING:
    from headrace.sources.discovery import Pattern
    from headrace.sources.kinds import Survey


Facts = tuple[tuple[str, str], ...]
"""Facts about a location: (subject, fact)."""

_CHUNK = 2**14
UNKNOWN = -1
"""Size of an object that the listing does not contain."""


class Entries(Sequence[str]):
    """Addresses, with facts about each by its number.

    Args:
        sizes: Sizes of the objects in bytes, or `UNKNOWN`. None: all unknown.
        etags: ETags of the objects; empty if unknown. None: all unknown.
        start: Start of the paths below the listed folder, in characters.

    Attributes:
        revision: The folder's address at its current revision, if it has revisions; else empty.
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

    __hash__ = None  # type: ignore[assignment]  # like a list

    def version(self, number: int) -> Version | None:
        size = UNKNOWN if self.sizes is None else int(self.sizes[number])
        etag = "" if self.etags is None else self.etags[number]
        if size == UNKNOWN and not etag:
            return None
        return Version(None if size == UNKNOWN else size, etag or None, "listed")

    @cached_property
    def survey(self) -> Survey:
        from headrace.sources.kinds import surveyed  # imports modules that are rarely needed

        return surveyed(self.names, self.start)

    def listed(self) -> Iterator[Listed]:
        for start in range(0, len(self), _CHUNK):
            names = self.names[start : start + _CHUNK]
            sizes = [UNKNOWN] * len(names) if self.sizes is None else self.sizes[start : start + _CHUNK].tolist()
            etags = [""] * len(names) if self.etags is None else self.etags[start : start + _CHUNK]
            for name, size, etag in zip(names, sizes, etags, strict=True):
                yield Listed(name, None if size == UNKNOWN else size, etag or None)


class EntriesBuilder:
    """Collects listed objects in any order, as compact arrays instead of Python strings."""

    def __init__(self) -> None:
        self._names, self._etags = _Texts(), _Texts()
        self._sizes = array("q")
        self._last, self._is_sorted = "", True

    def add(self, objects: Sequence[Listed]) -> None:
        names = [one.path for one in objects]
        self._names.add(names)
        self._etags.add([one.etag or "" for one in objects])
        self._sizes.extend(UNKNOWN if one.size is None else one.size for one in objects)
        self._is_sorted = self._is_sorted and all(map(operator.le, [self._last, *names], names))
        self._last = names[-1] if names else self._last

    def as_added(self, start: int = 0) -> Entries:
        sizes = np.frombuffer(self._sizes, np.int64) if self._sizes else np.zeros(0, np.int64)
        etags = self._etags.packed() if self._etags.data else None
        return Entries(self._names.packed(), sizes if (sizes != UNKNOWN).any() else None, etags, start)

    def in_order(self, start: int = 0) -> Entries:
        found = self.as_added(start)
        if self._is_sorted:
            return found
        order = sorted(range(len(found)), key=list(found.names).__getitem__)
        etags = None if found.etags is None else packed(found.etags[k] for k in order)
        sizes = None if found.sizes is None else found.sizes[order]
        return Entries(packed(found.names[k] for k in order), sizes, etags, start)


class _Texts:
    def __init__(self) -> None:
        self.data, self._ends = bytearray(), array("q", [0])

    def add(self, texts: Sequence[str]) -> None:
        pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._ends.extend(islice(accumulate(map(len, pieces), initial=len(self.data)), 1, None))
        self.data += b"".join(pieces)

    def packed(self) -> Packed[str]:
        return Packed("str", np.frombuffer(self.data, np.uint8), np.frombuffer(self._ends, np.int64))


def entries_of(objects: Iterable[Listed], start: int = 0) -> Entries:
    builder, source = EntriesBuilder(), iter(objects)
    while chunk := list(islice(source, _CHUNK)):
        builder.add(chunk)
    return builder.as_added(start)


def save_entries(entries: Entries, path: Path, about: Mapping[str, object]) -> None:
    from headrace.fetch.stores.writing import replacing
    from headrace.sources.kinds import survey_to_keep

    about = {**about, "start": entries.start, "revision": entries.revision, "survey": survey_to_keep(entries.survey)}
    columns: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    columns["names"], columns["name_ends"] = entries.names.arrays
    if entries.sizes is not None:
        columns["sizes"] = entries.sizes
    if entries.etags is not None:
        columns["etags"], columns["etag_ends"] = entries.etags.arrays
    with replacing(path) as file:
        np.savez(file, **columns)


def load_entries(path: Path) -> tuple[Entries, dict[str, int]]:
    """Return (entries, numbers of skipped objects by reason) of a file written by `save_entries`."""
    from headrace.sources.kinds import kept_survey

    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as columns:
            about = json.loads(columns["about"].tobytes())
            names = Packed[str]("str", columns["names"], columns["name_ends"])
            etags = Packed[str]("str", columns["etags"], columns["etag_ends"]) if "etags" in columns else None
            found = Entries(names, columns.get("sizes"), etags, about["start"])
            found.revision = about["revision"]
            if (survey := kept_survey(about["survey"])) is not None:
                found.survey = survey
            left_out = {why: int(count) for why, count in dict(about["left_out"]).items()}
    except (BadZipFile, EOFError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise FormatError(f"{path} is no list of names of headrace's, or damaged; remove it", url=str(path)) from error
    return found, left_out


def listed_of(urls: Sequence[str]) -> Iterator[Listed]:
    return urls.listed() if isinstance(urls, Entries) else map(Listed, urls)


def version_at(urls: Sequence[str], number: int) -> Version | None:
    return urls.version(number) if isinstance(urls, Entries) else None


def check_listed(urls: Sequence[str], number: int, size: int | None, etag: str | None) -> None:
    (version_at(urls, number) or Version()).check_listed(urls[number], size, etag)


def shown(urls: Sequence[str]) -> str:
    """Return the first address and the number of the others."""
    return masked(urls[0]) + (f" and {len(urls) - 1} more" if len(urls) > 1 else "")


def survey_of(urls: Sequence[str]) -> Survey:
    from headrace.sources.kinds import path_in, surveyed

    start = urls.start if isinstance(urls, Entries) else 0
    if any(url.startswith(("http://", "https://")) for url in urls[:1]):
        return surveyed(map(path_in, urls), start)
    return urls.survey if isinstance(urls, Entries) else surveyed(urls, start)


def only(urls: Sequence[str], is_wanted: Callable[[str], bool]) -> Entries:
    some = entries_of((one for one in listed_of(urls) if is_wanted(one.path)), getattr(urls, "start", 0))
    some.revision = getattr(urls, "revision", "")
    return some


_ATTEMPTS = 3
_SKIPPED = re.compile(
    r"(?:^|/)(?:(?P<programs>(?-i:_temporary|_delta_log|__pycache__|__MACOSX))/"
    r"|(?P<marks>|_SUCCESS|_(?:started|committed)_\d+|_(?:common_)?metadata|Thumbs\.db|desktop\.ini)\Z"
    r"|(?P<beside>[^/]*\.(?:crc|hri|idx|md5|sha1|sha256|tmp|part|lock|incomplete))\Z"
    r"|(?P<about>(?:README|LICEN[CS]E|CHANGELOG|CITATION|checksums?|SHA256SUMS|MD5SUMS)(?:\.[^/]*)?)\Z)",
    re.IGNORECASE,
)
_REASONS = {
    "programs": "of other programs",
    "marks": "marks of other programs",
    "beside": "beside data (indexes, checksums, parts)",
    "about": "about the data (README and the like)",
}


@dataclass(frozen=True)
class Listing:
    """The objects of a folder or pattern.

    Attributes:
        folder: The listed folder, with a slash at its end.
        left_out: Number of skipped objects, by reason.
        is_whole: True if there was no pattern.
    """

    place: str
    folder: str
    urls: Entries
    left_out: Mapping[str, int] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def text(self) -> str:
        sizes = np.zeros(0) if self.urls.sizes is None else self.urls.sizes
        is_known = len(sizes) == len(self.urls) and (sizes != UNKNOWN).all()
        size = f", {int(sizes.sum()):,} bytes" if is_known else ""
        out = ", ".join(f"{count:,} {why}" for why, count in sorted(self.left_out.items()))
        return f"{len(self.urls):,} objects in {masked(self.place)}{size}{f'; skipped: {out}' if out else ''}"


def listing_of(place: str, pattern: Pattern | None, storage_options: Options, *, kept: bool) -> Listing:
    """List a folder (`place` with a slash at its end) or pattern, sorted by address.

    With `kept`, use the listing cached on this machine, or create it.
    """
    path: Path | None = None
    if kept:
        from headrace.indexes.cache_path import names_path

        path = names_path(place, storage_options)
    folder, levels = (place, None) if pattern is None else (pattern.folder, pattern.levels)
    folder = as_listed(folder)
    if path is not None and path.exists():
        urls, counts = load_entries(path)
        return Listing(place, urls.revision or folder, urls, counts, is_whole=pattern is None)

    async def attempt() -> Listing:
        pin = await pinned(folder, storage_options)
        there = pin or folder
        left_out, builder = Counter[str](), EntriesBuilder()
        async with aclosing(listed(there, levels, storage_options)) as pages:
            async for page in pages:
                builder.add(_chosen(page, len(there), pattern, left_out))
        urls = builder.in_order(len(there))
        urls.revision = pin or ""
        if path is not None:
            save_entries(urls, path, {"left_out": left_out, "listed_at": int(time.time())})
        return Listing(place, there, urls, dict(left_out), is_whole=pattern is None)

    async def attempts() -> Listing:
        for number in range(1, _ATTEMPTS):
            try:
                return await attempt()
            except (AccessDeniedError, ObjectMissingError):
                raise
            except (StorageError, TimeoutError):
                await asyncio.sleep(number)
        return await attempt()

    return blocking(attempts)


def _chosen(page: Sequence[Listed], start: int, pattern: Pattern | None, left_out: Counter[str]) -> list[Listed]:
    """Return the objects to read, whose paths begin at `start`. Count the others in `left_out`, by reason."""
    matches, is_open = (None, True) if pattern is None else (pattern.matches, pattern.is_open)
    data = []
    for one in page:
        below = one.path[start:]
        if matches is not None and not matches(below):
            continue
        if is_open and (why := _why_not(below, hides=matches is None)) is not None:
            left_out[why] += 1
        else:
            data.append(one)
    return data


def is_data_folder(name: str) -> bool:
    return _why_not(f"{name}/data", hides=True) is None


def _why_not(path: str, *, hides: bool) -> str | None:
    if hides and (path.startswith(".") or "/." in path):
        return "hidden"
    found = _SKIPPED.search(path)
    return None if found is None else _REASONS[str(found.lastgroup)]
