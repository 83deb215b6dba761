"""The formats that are known: headrace's own, and those that others have added."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points

from headrace.errors import OptionError, masked
from headrace.formats.arrow.format import ARROW
from headrace.formats.compression.decompressor import path_of, without_compression
from headrace.formats.delimited import CSV, TSV
from headrace.formats.energon.format import ENERGON
from headrace.formats.format import Format
from headrace.formats.json_lines import JSON_LINES
from headrace.formats.litdata.format import LITDATA
from headrace.formats.mds.format import MDS
from headrace.formats.mp4.format import MP4
from headrace.formats.parquet.format import PARQUET
from headrace.formats.plain_text import TEXT
from headrace.formats.safetensors import SAFETENSORS
from headrace.formats.tar.format import TAR
from headrace.formats.tfrecord.format import TFRECORD
from headrace.formats.zip.format import NPZ, ZIP

_OURS: tuple[Format, ...] = (
    TAR,
    JSON_LINES,
    PARQUET,
    ARROW,
    MDS,
    LITDATA,
    ENERGON,
    TFRECORD,
    MP4,
    ZIP,
    NPZ,
    SAFETENSORS,
    CSV,
    TSV,
    TEXT,
)
_OWN: dict[str, Format] = {own.name: own for own in _OURS}
_NAME = re.compile(r"[a-z0-9_+-]+")
_SUFFIX = re.compile(r"(\.[a-z0-9_+-]+)+")
SNIFFED_BYTES = 4096
_SEEN_MOST = 4096

_registered: dict[str, Format] = {}


def register_format(format: Format) -> None:  # noqa: A002 (the name that the field uses)
    """Have `hr.stream` read shards of this format, in streams that are made from now on.

    It is chosen by a name's suffix, by `format=`, or by `sniff` where neither says anything. It goes to the workers
    with the streams. A second registration of a name wins over the first, and any over an installed package's, which
    can name its format as an entry point of the group `headrace.formats` instead. `headrace.testing.FormatContract`
    tests a format.

    Args:
        format: an instance; see `headrace.formats.format.Format`.

    Raises:
        OptionError: its name or a suffix is none, or one of headrace's own; or another format has that suffix.
    """
    for other in {**_installed(), **_registered}.values():
        for suffix in set(other.suffixes) & set(_checked(format).suffixes):
            if other.name != format.name:
                raise OptionError(
                    f"the suffix {suffix!r} of {format.name} is one of {other.name}'s: leave it out, and give "
                    f"format={format.name!r} to streams"
                )
    _registered[_checked(format).name] = format


def known_formats() -> dict[str, Format]:
    """All formats by name."""
    return {**_installed(), **_registered, **_OWN}


def format_named(name: str | Format) -> Format:
    """The format that `format=name` means: one that is known, or itself, with options of its own.

    Raises:
        OptionError: there is none.
    """
    if isinstance(name, Format):
        return name
    known = known_formats()
    if name not in tuple(known):
        names = " and ".join([", ".join(map(repr, [*known][:-1])), repr([*known][-1])])
        raise OptionError(f"format={name!r} is not known; {names} are")
    return known[name]


def format_of(urls: Iterable[str]) -> Format | None:
    """The format that the names of shards say; None where they say none.

    Raises:
        OptionError: they say several, or some say none; or two formats have one suffix.
    """
    says = formats_by_names()
    found: Format | None = None
    first = ""
    for url in urls:
        one = says(url)
        if first and one is not found:
            said = f"{masked(url)} says {one.name}" if one is not None else f"{masked(url)} does not say its format"
            said_first = f"{masked(first)} {'says ' + found.name if found is not None else 'does not'}"
            raise OptionError(f"{said}, and {said_first}: all shards of a stream are of one format, or give format=")
        found, first = one, url
    return found


def formats_by_names() -> Callable[[str], Format | None]:
    """Gives the format that an address says by its name; None where it says none. It is for many addresses.

    It raises an OptionError where two formats have one suffix.
    """
    endings: defaultdict[str, list[Format]] = defaultdict(list)
    for known in known_formats().values():
        for suffix in known.suffixes:
            endings[suffix].append(known)
    seen: dict[str, Format | None] = {}

    def says(url: str) -> Format | None:
        path = path_of(url).lower()
        dot = path.find(".", path.rfind("/") + 1)
        tail = path[dot:] if dot >= 0 else ""
        if tail in seen:
            return seen[tail]
        bare = without_compression(path)
        # the longest suffix that fits: a format may be more special than another
        fitting = endings.get(max((suffix for suffix in endings if bare.endswith(suffix)), key=len, default=""), [])
        if len(fitting) > 1:  # of packages that do not know each other
            names = " and ".join(one.name for one in fitting)
            raise OptionError(f"{masked(url)} may be of the formats {names}: say which by format=")
        if len(seen) < _SEEN_MOST:
            seen[tail] = fitting[0] if fitting else None
        return fitting[0] if fitting else None

    return says


def sniffed(url: str, head: bytes) -> Format | None:
    """The format that is surest of an object by its first bytes; None where none is."""
    name = path_of(url).rpartition("/")[2]
    return _surest({one.name: one.sniff(name, head) for one in known_formats().values()})


def sniffed_by_end(url: str, tail: bytes) -> Format | None:
    """The format that is surest of an object by its last bytes; None where none is."""
    name = path_of(url).rpartition("/")[2]
    return _surest({one.name: one.sniff_end(name, tail) for one in known_formats().values()})


def _surest(sure: Mapping[str, float]) -> Format | None:
    best = max(sure, key=lambda name: sure[name])
    return known_formats()[best] if sure[best] > 0 else None


def _checked(one: Format) -> Format:
    if one.name in _OWN or not _NAME.fullmatch(one.name):
        raise OptionError(f"the format {one.name!r} must be called by a-z, 0-9, '_', '+' and '-', and not as ours are")
    taken = [suffix for own in _OWN.values() for suffix in own.suffixes]
    for suffix in one.suffixes:
        if not _SUFFIX.fullmatch(suffix) or suffix in taken or without_compression(f"x{suffix}") != f"x{suffix}":
            raise OptionError(
                f"the suffix {suffix!r} of {one.name} must be like '.rec', and none of {', '.join(taken)}"
            )
    return one


@functools.cache
def _installed() -> dict[str, Format]:
    loaded = (entry.load() for entry in entry_points(group="headrace.formats"))
    return {one.name: _checked(one) for one in (one() if isinstance(one, type) else one for one in loaded)}
