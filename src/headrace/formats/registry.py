"""The registry of formats: built-in, registered and installed ones."""

from __future__ import annotations

import functools
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from headrace._util import check
from headrace.errors import OptionError, masked
from headrace.formats.compression import path_of, without_compression

if TYPE_CHECKING:
    from headrace.formats.format import Format


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """Metadata of a format. `load` returns the format, and imports its module if needed."""

    name: str
    suffixes: tuple[str, ...]
    catalogue: str | None
    load: Callable[[], Format]

    @classmethod
    def of(cls, form: Format) -> KnownFormat:
        return cls(form.name, form.suffixes, form.catalogue, lambda: form)


def _ours(name: str, *suffixes: str, home: str, catalogue: str | None = None) -> KnownFormat:
    return KnownFormat(name, suffixes, catalogue, lambda: cast("Format", pkgutil.resolve_name(f"{__package__}.{home}")))


# Tests compare this table with the modules.
_OURS = (
    _ours("tar", ".tar", home="tar.scanner:TAR"),
    _ours("jsonl", ".jsonl", ".ndjson", home="lines:JSON_LINES"),
    _ours("parquet", ".parquet", ".parq", ".pq", home="parquet.format:PARQUET"),
    _ours("arrow", ".arrow", ".feather", ".ipc", home="arrow:ARROW"),
    _ours("mds", ".mds", home="mds:MDS", catalogue="index.json"),
    _ours("litdata", home="litdata.format:LITDATA", catalogue="index.json"),
    _ours("energon", home="energon:ENERGON", catalogue=".nv-meta/split.yaml"),
    _ours("tfrecord", ".tfrecord", ".tfrecords", home="tfrecord:TFRECORD"),
    _ours("mp4", ".mp4", ".m4v", ".mov", home="mp4.format:MP4"),
    _ours("zip", ".zip", home="zip:ZIP"),
    _ours("npz", ".npz", home="zip:NPZ"),
    _ours("safetensors", ".safetensors", home="safetensors:SAFETENSORS"),
    _ours("csv", ".csv", home="delimited:CSV"),
    _ours("tsv", ".tsv", home="delimited:TSV"),
    _ours("text", ".txt", home="lines:TEXT"),
)
_OWN = {own.name: own for own in _OURS}
_OWN_SUFFIXES = {suffix: own for own in _OURS for suffix in own.suffixes}
_NAME = re.compile(r"[a-z0-9_+-]+")
_SUFFIX = re.compile(r"(\.[a-z0-9_+-]+)+")
SNIFFED_BYTES = 4096
_SEEN_MOST = 4096

_registered: dict[str, Format] = {}


def register_format(format: Format) -> None:  # noqa: A002 (the name that the field uses)
    """Let `hr.stream` read shards of this format, in streams created from now on.

    The format is chosen by the suffix of a name, by `format=`, or by `sniff` if neither determines it. It is sent to
    the workers with the streams. A second registration of a name replaces the first, and any registration replaces an
    installed package's. A package can also name its format as an entry point of the group `headrace.formats`. Test a
    format with `headrace.testing.FormatContract`.

    Args:
        format: An instance; see `headrace.formats.format.Format`.

    Raises:
        OptionError: The name or a suffix is invalid or one of headrace's own, or another format has the suffix.
    """
    for other in {**_installed(), **_registered}.values():
        for suffix in set(other.suffixes) & set(_checked(format).suffixes):
            if other.name != format.name:
                raise OptionError(
                    f"the suffix {suffix!r} of {format.name} is one of {other.name}'s: leave it out, and give "
                    f"format={format.name!r} to streams"
                )
    _registered[_checked(format).name] = format


def known_formats() -> dict[str, KnownFormat]:
    others = {**_installed(), **_registered}
    return {**{name: KnownFormat.of(other) for name, other in others.items()}, **_OWN}


def format_named(name: str | Format) -> Format:
    """Return the format for `format=name`. An instance is returned unchanged."""
    from headrace.formats.format import Format

    if isinstance(name, Format):
        return name
    known = known_formats()
    check.one_of("format", name, known)
    return known[name].load()


def format_of(urls: Iterable[str]) -> Format | None:
    """Return the format that the names of shards determine. None if no name does."""
    says = formats_by_names()
    found: KnownFormat | None = None
    first = ""
    for url in urls:
        one = says(url)
        if first and one is not found:
            said = f"{masked(url)} is {one.name}" if one is not None else f"the name of {masked(url)} has no format"
            said_first = f"{masked(first)} {'is ' + found.name if found is not None else 'has none'}"
            raise OptionError(f"{said}, and {said_first}: all shards of a stream are of one format, or give format=")
        found, first = one, url
    return None if found is None else found.load()


def formats_by_names() -> Callable[[str], KnownFormat | None]:
    """Return a function that maps a URL to the format of its suffix, or None.

    It caches results, and raises an OptionError if two formats have the suffix.
    """
    endings: defaultdict[str, list[KnownFormat]] = defaultdict(list)
    seen: dict[str, KnownFormat | None] = {**_OWN_SUFFIXES}  # by everything after the first dot: no suffix is longer

    def says(url: str) -> KnownFormat | None:
        path = path_of(url).lower()
        dot = path.find(".", path.rfind("/") + 1)
        tail = path[dot:] if dot >= 0 else ""
        if tail in seen:
            return seen[tail]
        if not endings:
            for known in known_formats().values():
                for suffix in known.suffixes:
                    endings[suffix].append(known)
        bare = without_compression(path)
        # the longest matching suffix: a format may specialize another
        fitting = endings.get(max((suffix for suffix in endings if bare.endswith(suffix)), key=len, default=""), [])
        if len(fitting) > 1:  # of unrelated packages
            names = " and ".join(one.name for one in fitting)
            raise OptionError.at(url, f"may be of the formats {names}: name it by format=")
        if len(seen) < _SEEN_MOST:
            seen[tail] = fitting[0] if fitting else None
        return fitting[0] if fitting else None

    return says


def sniffed(name: str, head: bytes, known: Iterable[KnownFormat] | None = None) -> Format | None:
    """Return the format that an object's name and first bytes show, of all formats or of those that are given."""
    forms = [one.load() for one in (known_formats().values() if known is None else known)]
    sure = {form.sniff(name, head): form for form in reversed(forms)}
    return sure[max(sure)] if max(sure, default=0.0) > 0 else None


def _checked(one: Format) -> Format:
    if one.name in _OWN or not _NAME.fullmatch(one.name):
        raise check.invalid("the format's name", one.name, "of a-z, 0-9, '_', '+' and '-', and not as ours are")
    for suffix in one.suffixes:
        if (
            not _SUFFIX.fullmatch(suffix)
            or suffix in _OWN_SUFFIXES
            or without_compression(f"x{suffix}") != f"x{suffix}"
        ):
            needed = f"like '.rec', and none of {', '.join(_OWN_SUFFIXES)}"
            raise check.invalid(f"the suffix of {one.name}", suffix, needed)
    return one


@functools.cache
def _installed() -> dict[str, Format]:
    loaded = (entry.load() for entry in entry_points(group="headrace.formats"))
    return {one.name: _checked(one) for one in (one() if isinstance(one, type) else one for one in loaded)}
