"""Lists a folder or pattern, page by page. The result is sorted and compact."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from headrace.dataset.source import blocking
from headrace.errors import AccessDeniedError, FormatError, ObjectMissingError, StorageError, masked
from headrace.indexes.cache_path import names_path
from headrace.sources.discovery.entries import Entries, EntriesBuilder, load_entries, save_entries
from headrace.sources.discovery.urls import Pattern
from headrace.sources.reading import Options, as_listed, listed, pinned
from headrace.types import Listed

_ATTEMPTS = 3
_MARKS = re.compile(r"_SUCCESS|_(?:started|committed)_\d+|_(?:common_)?metadata|Thumbs\.db|desktop\.ini", re.IGNORECASE)
_ABOUT = re.compile(r"(?:README|LICEN[CS]E|CHANGELOG|CITATION|checksums?|SHA256SUMS|MD5SUMS)(?:\..*)?", re.IGNORECASE)
_BESIDE = re.compile(r".*\.(?:crc|hri|idx|md5|sha1|sha256|tmp|part|lock|incomplete)", re.IGNORECASE | re.DOTALL)

# Only names with one of these beginnings or endings are checked further; most have none.
_MAYBE_NOT = re.compile(
    r"(?:^|/)(?:[._]|$|Thumbs|desktop|README|LICEN|CHANGELOG|CITATION|check|SHA|MD5)"
    r"|\.(?:crc|hri|idx|md5|sha1|sha256|tmp|part|lock|incomplete)$",
    re.IGNORECASE,
).search


@dataclass(frozen=True)
class Listing:
    """The objects of a folder or pattern.

    Attributes:
        folder: The listed folder, with a slash at its end.
        nbytes: Total size. None: not known of all.
        left_out: Number of skipped objects, by reason.
        listed_at: Seconds since 1970.
        is_whole: True if there was no pattern.
    """

    place: str
    folder: str
    urls: Entries
    nbytes: int | None
    left_out: Mapping[str, int] = field(default_factory=dict)
    listed_at: int = 0
    is_whole: bool = True

    @property
    def text(self) -> str:
        size = "" if self.nbytes is None else f", {self.nbytes:,} bytes"
        out = ", ".join(f"{count:,} {why}" for why, count in sorted(self.left_out.items()))
        return f"{len(self.urls):,} objects in {masked(self.place)}{size}{f'; skipped: {out}' if out else ''}"


def listing_of(place: str, pattern: Pattern | None, storage_options: Options, *, kept: bool) -> Listing:
    """List a folder (`place` with a slash at its end) or pattern, sorted by address.

    With `kept`, use the listing cached on this machine, or create it.
    """
    path = names_path(place, storage_options)
    folder, levels = (place, None) if pattern is None else (pattern.folder, pattern.levels)
    folder = as_listed(folder)
    if kept and path.exists():
        return _kept(place, folder, pattern, path)
    began = int(time.time())

    async def attempt() -> Listing:
        pin = await pinned(folder, storage_options)
        there = pin or folder
        leaves_out = _LeavesOut(len(there), pattern)
        builder = EntriesBuilder()
        async with aclosing(listed(there, levels, storage_options)) as pages:
            async for page in pages:
                builder.add(leaves_out.chosen(page))
        urls = builder.in_order(len(there))
        urls.revision = pin or ""
        counts = dict(leaves_out.counts)
        if kept:
            save_entries(urls, path, {"nbytes": leaves_out.nbytes, "left_out": counts, "listed_at": began})
        return Listing(place, there, urls, leaves_out.nbytes, counts, began, is_whole=pattern is None)

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


class _LeavesOut:
    def __init__(self, start: int, pattern: Pattern | None) -> None:
        self._start, self._matches = start, None if pattern is None else pattern.matches
        self._is_open = pattern is None or pattern.is_open
        self.counts: Counter[str] = Counter()
        self.nbytes: int | None = 0

    def chosen(self, page: Sequence[Listed]) -> list[Listed]:
        data = []
        start, matches, is_open, hides = self._start, self._matches, self._is_open, self._matches is None
        for one in page:
            below = one.path[start:]
            if matches is not None and not matches(below):
                continue
            if is_open and _MAYBE_NOT(below) and (why := _why_not(below, hides=hides)) is not None:
                self.counts[why] += 1
                continue
            data.append(one)
        sizes = [one.size for one in data if one.size is not None]
        self.nbytes = None if self.nbytes is None or len(sizes) < len(data) else self.nbytes + sum(sizes)
        return data


def is_data_folder(name: str) -> bool:
    return _why_not(f"{name}/data", hides=True) is None


def _why_not(path: str, *, hides: bool) -> str | None:
    if hides and (path.startswith(".") or "/." in path):
        return "hidden"
    parts = path.split("/")
    if any(part in ("_temporary", "_delta_log", "__pycache__", "__MACOSX") for part in parts[:-1]):
        return "of other programs"
    name = parts[-1]
    if not name or _MARKS.fullmatch(name):
        return "marks of other programs"
    if _BESIDE.fullmatch(name):
        return "beside data (indexes, checksums, parts)"
    return "about the data (README and the like)" if _ABOUT.fullmatch(name) else None


def _kept(place: str, folder: str, pattern: Pattern | None, path: Path) -> Listing:
    from headrace.formats.json_values import as_number, as_object

    names, about = load_entries(path)
    nbytes, at = as_number(about.get("nbytes")), as_number(about.get("listed_at"))
    left_out = {why: as_number(count) for why, count in (as_object(about.get("left_out")) or {}).items()}
    if at is None or None in left_out.values():
        raise FormatError(f"{path} is damaged; remove it", url=str(path))
    counts = {why: count or 0 for why, count in left_out.items()}
    return Listing(place, names.revision or folder, names, nbytes, counts, at, is_whole=pattern is None)
