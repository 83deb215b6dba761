"""Discovery: what an address, list, pattern or folder contains, and why."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace._util import check
from headrace.dataset.source import blocking
from headrace.errors import OptionError, StorageError, masked
from headrace.fetch.stores.addresses import WEB_SCHEMES
from headrace.formats.compression import begin_of, ending_of, kind_by_bytes, kind_of, path_of, without_compression
from headrace.formats.limits import Limits
from headrace.formats.registry import (
    SNIFFED_BYTES,
    KnownFormat,
    format_named,
    format_of,
    formats_by_names,
    known_formats,
    sniffed,
)
from headrace.sources.entries import Entries, Facts, Listing, entries_of, listed_of, listing_of, only, survey_of
from headrace.sources.reading import Options, found

if TYPE_CHECKING:
    from headrace.formats.format import Format, ShardEntry
    from headrace.sources.kinds import Survey


Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Asks = Callable[[str, int | None], bytes | None]

_WEB = ("http://", "https://")
_ASKED_MOST = 1000  # addresses of longer lists are not checked for folders
_LEROBOT = "meta/info.json"
_BLOCK_BYTES = 2**20
_PAGES = (b"<!doctype html", b"<html", b"[")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_ROOT = re.compile(r"hf://(?:(?:datasets|models|spaces)/)?[^/]+/[^/]+/?")


@dataclass(frozen=True)
class Place:
    """The objects at an address.

    Attributes:
        format: Format of the shards. None: objects are single samples.
        entries: The shards, if a catalogue lists them.
        facts: Reasons for the result.
        folder: The listing, for single samples.
        table: A table that lists the samples, if there is one.
    """

    urls: Sequence[str]
    format: Format | None
    facts: Facts
    entries: Sequence[ShardEntry] | None = None
    folder: Listing | None = None
    table: str | None = None


@dataclass(frozen=True)
class Names:
    urls: Sequence[str]
    listings: tuple[Listing, ...] = ()

    @property
    def facts(self) -> Facts:
        listed = tuple(("listed", one.text) for one in self.listings)
        pins = [masked(one.urls.revision) for one in self.listings if one.urls.revision]
        return (*listed, ("revision", f"{', '.join(pins)}, as it was when it was listed")) if pins else listed


def names_at(
    urls: object, storage_options: Options, *, kept: bool = False, folders: Sequence[str] | None = None
) -> Names:
    """Resolve addresses: patterns are listed, and folders if `folders` is given.

    Args:
        folders: Lower-case suffixes of the wanted names in a folder. If no name matches, or there are no suffixes, all
            names are used. None: folders are not listed.
    """
    given = expand(urls)  # type: ignore[arg-type]
    is_folder = _is_folder if len(given) <= _ASKED_MOST else lambda url: url.endswith("/")
    looked_up = [is_pattern(url) or (folders is not None and is_folder(url)) for url in given]
    if not any(looked_up):
        return Names(given)
    parts: list[Sequence[str]] = []
    listings: list[Listing] = []
    for url, is_looked_up in zip(given, looked_up, strict=True):
        if not is_looked_up:
            parts.append((url,))
        elif is_pattern(url):
            listing = listing_of(url, Pattern(url), storage_options, kept=kept)
            if not listing.urls:
                where = masked(listing.folder) or "the working folder"
                raise check.empty(where, f"object like {masked(url)}", listing.text)
            listings.append(listing)
            parts.append(listing.urls)
        else:
            listings += folders_at((url,), storage_options, kept=kept).listings
            parts.append(_ending_so(listings[-1].urls, tuple(folders or ())))
    return Names(_joined(parts), tuple(listings))


def _ending_so(urls: Entries, ends: tuple[str, ...]) -> Entries:
    from headrace.sources.kinds import path_in

    some = only(urls, lambda url: path_in(url).lower().endswith(ends)) if ends else urls
    return some if len(some) else urls


def place_of(
    names: Names, given: str | Format | None, limits: Limits, storage_options: Options, *, kept: bool = False
) -> Place:
    """Determine what the addresses contain. `kept`: use listings cached on this machine."""

    def asks(url: str, count: int | None) -> bytes | None:
        """Read `count` first bytes, or all (None). None if not readable."""
        return blocking(partial(found, url, count, storage_options))

    urls = names.urls
    if names.listings:
        if given is None:
            return _by_kinds(names, asks)
        return Place(urls, format_named(given), (*names.facts, ("format", "as it was given")))
    form = format_of(urls) if given is None else format_named(given)
    if (form is None or form.catalogue is not None) and (there := _catalogue(urls, form, asks, limits)) is not None:
        return there
    if all(map(_is_folder, urls)):
        names = folders_at(urls, storage_options, kept=kept)
        return _by_kinds(names, asks) if form is None else _of_format(names, form)
    if form is not None:
        why = "as it was given" if given is not None else "by the names"
        return Place(urls, form, (("format", f"{form.name}, {why}"),))
    return _sniffed(names, asks, storage_options, kept=kept)


def _by_kinds(names: Names, asks: Asks) -> Place:
    from headrace.sources.kinds import mixed, way_round

    urls, facts, first = names.urls, names.facts, names.listings[0]
    kinds = survey_of(urls)
    if kinds.media and len(kinds.tables) == 1 and len(names.listings) == 1 and first.is_whole:
        return Place(urls, None, facts, folder=first, table=kinds.tables[0])
    if kinds.is_unnamed:
        url = next((one.path for one in listed_of(urls) if one.size != 0), urls[0])
        form, which = _by_bytes(url, asks, asks(url, SNIFFED_BYTES))
        if form is not None:
            return Place(urls, form, (*facts, ("format", f"{form.name}, by the {which} bytes of {masked(url)}")))
    if kinds.is_loose:
        if len(names.listings) > 1:
            raise check.conflict(first.text, "other folders", "hr.files reads objects of one sample each")
        return Place(urls, None, facts, folder=first)
    if len(kinds.formats) > 1 or (kinds.formats and kinds.others):
        urls, facts = _without_what_lies_beside(names, kinds)
        kinds = survey_of(urls)
    if len(kinds.formats) == 1 and not kinds.others:
        form = format_named(next(iter(kinds.formats)))
        return Place(urls, form, (*facts, ("format", f"{form.name}, by the names of {len(urls):,} objects")))
    if not kinds.is_unnamed:
        raise _of_lerobot(first) if f"{first.folder}{_LEROBOT}" in first.urls else mixed(first.place, kinds)
    raise OptionError.at(first.place, f"has {kinds.text}, and nothing is known to read that{way_round(urls[0])}")


def _of_lerobot(folder: Listing) -> OptionError:
    place = masked(folder.place).rstrip("/")
    return OptionError(
        f"{place} is a data set of LeRobot's layout, by its {_LEROBOT}: hr.lerobot({place!r}) gives its rows with the "
        f"frames of their cameras, hr.stream('{place}/data/**/*.parquet') the rows alone, and "
        f"hr.video('{place}/videos/**/*.mp4', hr.Clips(…)) clips of its videos"
    )


def _by_bytes(url: str, asks: Asks, head: bytes | None) -> tuple[Format | None, str]:
    """Return the format by an object's first bytes, and which of them identified it.

    Of an object that is compressed by its name, the decompressed bytes are used.
    """
    if head is None:
        return None, ""
    kind, by_bytes = kind_of(url), kind_by_bytes(head)
    if kind is not None and by_bytes in (None, kind):
        return _by_unpacked_bytes(url, asks, head, kind), "unpacked"
    if (form := sniffed(_name_of(url), head)) is not None:
        return form, "first"
    if by_bytes is not None:
        name, ending = without_compression(path_of(url)).rpartition("/")[2], ending_of(by_bytes)
        raise OptionError.at(
            url,
            f"is {by_bytes} data, by its first bytes, and its name does not end so: give it a name such "
            f"as '{name}.jsonl{ending}', or '{name}{ending}' and format='jsonl'",
        )
    return None, ""


def _name_of(url: str) -> str:
    return path_of(url).rpartition("/")[2]


def _by_unpacked_bytes(url: str, asks: Asks, head: bytes, kind: str) -> Format | None:
    from headrace.formats.format import packing_of

    begin = begin_of(kind, head, SNIFFED_BYTES)
    if not begin:  # bzip2 and Zstandard decompress whole blocks only
        begin = begin_of(kind, asks(url, _BLOCK_BYTES) or b"", SNIFFED_BYTES)
    form = sniffed(_name_of(url), begin)
    return None if form is None or packing_of(form, url) is None else form


def _without_what_lies_beside(names: Names, kinds: Survey) -> tuple[Sequence[str], Facts]:
    """Filter out tables and statistics named like a tar shard beside them."""
    from headrace.sources.kinds import only_shards

    if "tar" not in kinds.formats:
        return names.urls, names.facts
    urls = only(names.urls, only_shards(names.urls, "tar"))
    less = len(names.urls) - len(urls)
    fact = ("skipped", f"{less:,} objects that are beside a shard and have its name")
    return urls, (*names.facts, fact) if less else names.facts


def _of_format(names: Names, form: Format) -> Place:
    says_so = [one for one in form.suffixes if any(url.lower().endswith(one) for url in names.urls[:1000])]
    kinds = survey_of(names.urls)
    urls = names.urls
    if kinds.formats.get(form.name) and (len(kinds.formats) > 1 or kinds.others):
        says = formats_by_names()
        urls = only(urls, lambda url: (one := says(url)) is not None and one.name == form.name)
    why = f"{form.name}, as it was given{'' if says_so else '; the names do not show it'}"
    return Place(urls, form, (*names.facts, ("format", why)))


def _sniffed(names: Names, asks: Asks, storage_options: Options, *, kept: bool) -> Place:
    """Determine the format by the first bytes. If there is no such object, list the folder."""
    from headrace.sources.kinds import way_round

    urls = names.urls
    head = asks(urls[0], SNIFFED_BYTES)
    form, which = _by_bytes(urls[0], asks, head)
    if form is not None:
        return Place(urls, form, (("format", f"{form.name}, by the {which} bytes of {masked(urls[0])}"),))
    begin = (head or b"")[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if len(urls) == 1 and (head is None or (urls[0].startswith(_WEB) and begin.startswith(_PAGES))):
        try:
            folders = folders_at(urls, storage_options, kept=kept)
        except (OptionError, StorageError, OSError):
            if head is not None:
                raise
            folders = None  # it has no objects, or its store cannot list
        if folders is not None:
            return _by_kinds(folders, asks)
    if head is None and "://" not in urls[0] and not _HUB.fullmatch(urls[0]):
        _check_exists(urls[0])
    known = ", ".join(suffix for one in known_formats().values() for suffix in one.suffixes)
    hub = ""
    if _HUB.fullmatch(urls[0]) and head is None:
        hub = f"; of a repository on Hugging Face's hub the address is hf://datasets/{urls[0]}"
    no_bytes = "it cannot be read: there is no such object or folder, or no access to it"
    raise OptionError(
        f"the name of {masked(urls[0])} has no format, and "
        f"{no_bytes if head is None else 'its bytes do not either'}; names in {known} do, or "
        f"give format=, such as 'jsonl'; files of token ids are read by hr.tokens{hub}{way_round(urls[0])}"
    )


def _check_exists(path: str) -> None:
    from headrace.sources.kinds import way_round

    if not Path(path).exists():
        where = Path(path).absolute()
        raise OptionError.at(path, f"is missing: there is no file or folder {where}{way_round(path)}")


def _is_folder(url: str) -> bool:
    if url.endswith("/") or _HUB_ROOT.fullmatch(url):
        return True
    return "://" not in url and Path(url).is_dir()


def folders_at(urls: Sequence[str], storage_options: Options, *, kept: bool) -> Names:
    """List some folders."""
    listings = [listing_of(f"{url.rstrip('/')}/", None, storage_options, kept=kept) for url in urls]
    for listing in listings:
        if not listing.urls:
            if "://" not in listing.place:
                _check_exists(listing.place)
            raise check.empty(masked(listing.place), "object to read", listing.text)
    return Names(_joined([one.urls for one in listings]), tuple(listings))


def _joined(parts: Sequence[Sequence[str]]) -> Sequence[str]:
    if len(parts) == 1:
        return parts[0]
    whole = entries_of(one for part in parts for one in listed_of(part))
    whole.revision = ", ".join(sorted({part.revision for part in parts if isinstance(part, Entries) and part.revision}))
    seen: set[str] = set()
    for url in whole:
        if url in seen:
            raise OptionError.at(url, "is meant by two of the patterns: it would come twice")
        seen.add(url)
    return whole


def _catalogue(urls: Sequence[str], form: Format | None, asks: Asks, limits: Limits) -> Place | None:
    """Read the catalogues at or inside `urls`, of any format if `form` is None; None if missing."""
    from headrace.formats.catalogues import check_each_once

    named: defaultdict[str, list[KnownFormat]] = defaultdict(list)
    for one in [KnownFormat.of(form)] if form is not None else known_formats().values():
        if one.catalogue is not None:
            named[one.catalogue].append(one)
    entries: list[ShardEntry] = []
    facts: dict[tuple[str, str], None] = {}
    reads: Format | None = None
    for url in urls:
        for place, name in places_of_catalogues(url, tuple(named)):
            data = asks(place, None)
            said = None if data is None else form or sniffed(name, data[:SNIFFED_BYTES], named[name])
            if data is None or said is None:
                continue
            form = said
            found = form.catalogued(place, data, limits, partial(_beside, asks, place))
            if reads is not None and (found.form or form).name != reads.name:
                raise OptionError.at(url, f"has shards of {(found.form or form).name}, and others of {reads.name}")
            reads = found.form or form
            check_each_once(place, (entry.url for entry in found.entries))
            entries += found.entries
            facts |= dict.fromkeys(found.facts)
            break
        else:
            if entries:
                raise OptionError.at(url, f"is no folder of {form.name if form else 'shards'}, and others are")
            return None
    if form is None or reads is None:
        return None
    whose = "its" if reads is form else f"{form.name}'s"
    return Place(urls, reads, (("format", f"{reads.name}, by {whose} {form.catalogue}"), *facts), entries=entries)


def _beside(asks: Asks, place: str, name: str) -> bytes | None:
    from headrace.formats.catalogues import beside

    return asks(beside(place, name), None)


def places_of_catalogues(url: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (address, name) of each catalogue that an address may mean: itself, or inside it."""
    from headrace.formats.catalogues import split_path

    path, rest = split_path(url)
    itself = [name for name in names if f"/{path}".endswith(f"/{name}")]
    if itself:
        return [(url, itself[0])]
    if "." in path.rpartition("/")[2]:
        return []
    return [(f"{path.rstrip('/')}/{name}{rest}", name) for name in names]


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")


def expand(urls: Urls) -> tuple[str, ...]:
    """Expand braces in a pattern or a list of patterns.

    `{000..012}` counts (the width is kept, a third number is the step). `{train,test}` are alternatives.

    Raises:
        OptionError: there is no address, or one is empty or not a path.

    Examples:
        >>> expand("s3://bucket/train-{08..10}.tar")
        ('s3://bucket/train-08.tar', 's3://bucket/train-09.tar', 's3://bucket/train-10.tar')
    """
    is_some = not isinstance(urls, str | bytes | os.PathLike) and hasattr(type(urls), "__iter__")
    patterns: Iterable[object] = urls if is_some else [urls]  # type: ignore[assignment]  # it has __iter__
    found = tuple(url for pattern in patterns for url in _expanded(_as_text(pattern)))
    if not found or not all(found):
        needed = "an address, a pattern like 'a-{000..012}.tar', or a list of these"
        raise check.invalid("urls", [masked(url) for url in found], needed)
    return found


def _as_text(url: object) -> str:
    try:
        text = os.fspath(url)  # type: ignore[call-overload]  # raises if it is no path
    except TypeError:
        text = None
    if type(text) is bytes or text is None:
        needed = "an address; hr.from_map(dataset) and hr.from_iterable(iterable) make streams of data of this program"
        raise check.invalid("urls", url, needed)
    return str(text)


def _expanded(pattern: str) -> Iterator[str]:
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for choice in _choices(match[1], pattern):
        yield from _expanded(pattern[: match.start()] + choice + pattern[match.end() :])


def _choices(inside: str, pattern: str) -> list[str]:
    counted = _RANGE.fullmatch(inside)
    if counted is None:
        return inside.split(",")
    first, last = counted[1], counted[2]
    is_padded = any(re.match(r"-?0\d", number) for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    low, high = int(first), int(last)
    step = abs(int(counted[3])) if counted[3] else 1
    if not step:
        raise OptionError.at(pattern, f": a step of 0 never gets from {first} to {last}")
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]


_MAGIC = re.compile(r"[*?[]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://)?")


class Pattern:
    """An address with `*`, `?` or `[…]`, as in shells. `**` matches any number of folders.

    Names that begin with a dot match only if the pattern has the dot.

    Attributes:
        folder: The folder to list, with a slash at its end, or empty.
        levels: Levels of folders below it. None: all.
        is_open: True if the end of the pattern may match several kinds of objects.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        fixed = _MAGIC.search(url, _begin(url))
        assert fixed is not None, "it is no pattern"
        self.folder = url[: url.rfind("/", 0, fixed.start()) + 1]
        self._parts = url[len(self.folder) :].split("/")
        last = self._parts[-1]
        self.is_open = "." not in last or _MAGIC.search(last.rpartition(".")[2]) is not None
        self.levels = None if "**" in self._parts else len(self._parts)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        *folders, last = self._parts
        text = "".join(r"(?:(?!\.)[^/]+/)*" if part == "**" else f"{_translated(part)}/" for part in folders)
        text += r"(?:(?!\.)[^/]+/)*(?!\.)[^/]+" if last == "**" else _translated(last)
        return re.compile(text, re.DOTALL)

    def matches(self, path: str) -> bool:
        return self._regex.fullmatch(path) is not None

    def matches_below(self, name: str) -> bool:
        """True if objects in this direct subfolder may match."""
        first = self._parts[0]
        if first == "**":
            return not name.startswith(".")
        return len(self._parts) > 1 and re.fullmatch(_translated(first), name, re.DOTALL) is not None


def is_pattern(url: str) -> bool:
    """True if an address is a pattern. An existing file with such a name is not."""
    begin = _begin(url)
    scheme = url[:begin].partition(":")[0].lower()
    if scheme == "pipe":
        return False
    if scheme in WEB_SCHEMES:  # "?" begins a query
        return "*" in url[begin:].partition("?")[0]
    if _MAGIC.search(url, begin) is None:
        return False
    return not (not begin and os.path.lexists(url))


def _begin(url: str) -> int:
    match = _SCHEME.match(url)
    is_scheme = match is not None and (match[0].endswith("//") or match[1].lower() in ("file", "pipe"))
    return match.end() if match is not None and is_scheme else 0


def _translated(part: str) -> str:
    out, at = [], 0
    while at < len(part):
        sign, at = part[at], at + 1
        if sign == "*":
            out.append("[^/]*")
        elif sign == "?":
            out.append("[^/]")
        elif sign == "[" and (end := part.find("]", at + 1 + (part[at : at + 1] == "!"))) > 0:
            inside, at = part[at:end], end + 1
            out.append(_class(inside))
        else:
            out.append(re.escape(sign))
    hidden = "" if part.startswith(".") else r"(?!\.)"
    return hidden + "".join(out)


def _class(inside: str) -> str:
    """Translate the content of `[…]`: characters and ranges like a-z, negated by "!"."""
    negated = inside.startswith("!")
    signs, wanted, at = inside[negated:], [], 0
    while at < len(signs):
        if signs[at + 1 : at + 2] == "-" and at + 2 < len(signs):
            if signs[at] <= signs[at + 2]:
                wanted.append(f"{re.escape(signs[at])}-{re.escape(signs[at + 2])}")
            at += 3
        else:
            wanted.append(re.escape(signs[at]))
            at += 1
    if not wanted:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{''.join(wanted)}]"
