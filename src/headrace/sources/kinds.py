"""Kinds of objects, by their names, and hints for those that are not shards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice

from headrace.errors import OptionError, masked
from headrace.formats.compression import ENDINGS, path_of, without_compression
from headrace.formats.decoders import IMAGE_EXTENSIONS as IMAGES
from headrace.formats.decoders import WHAT_BY_EXTENSION, registered_decoders
from headrace.formats.registry import formats_by_names, known_formats

_SOUNDS = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac")
_FILMS = ("mp4", "m4v", "webm", "mkv", "avi", "mov", "mpg", "mpeg")
MEDIA = IMAGES | {"avif", "heic", "jp2", "jxl", "svg", "dcm", *_SOUNDS, *_FILMS}
"""Extensions of objects that are always one sample each."""

TABLE = re.compile(r"metadata\.(?:csv|tsv|jsonl|parquet)")
"""Names of tables about the objects beside them."""

_SHOWN = 6
_CHUNK = 2**14
_KEPT_MOST = 2**15  # folders, tables and extensions

_WAYS = {
    "bin": "raw tokens are for hr.tokens(url, dtype, window)",
    "idx": "it is beside a .bin of Megatron's, which is for hr.tokens",
    **dict.fromkeys(("h5", "hdf5", "nc"), "rows of its datasets are for hr.hdf5(url)"),
    "npy": "its rows are for hr.arrays(url), token ids for hr.tokens(url)",
    **dict.fromkeys(("rar", "7z"), "no part of such an archive can be read by itself: unpack it, or make it a .tar"),
    **dict.fromkeys(
        ("pt", "pth", "pkl", "pickle", "ckpt"), "reading a pickle runs code; hr.files(url) gives its bytes"
    ),
    **dict.fromkeys(("zarr", "lance"), "its own library reads it: hr.from_map takes what has __len__ and __getitem__"),
    **dict.fromkeys(("db", "sqlite", "lmdb", "mdb"), "a data base is for hr.from_map, with what reads its rows"),
    "csv": "hr.table(url) has a row as a sample",
    "json": "it has no JSON object on each line; hr.files(url).decode() has one JSON value in a file as one sample",
    **dict.fromkeys(MEDIA, "objects of one sample each are for hr.files(url), a folder of them for hr.folder(url)"),
}


def path_in(url: str) -> str:
    return path_of(url) if url.startswith(("http://", "https://")) else url


def extension_of(url: str) -> str:
    name = path_in(url).rpartition("/")[2]
    return name.rpartition(".")[2].lower() if "." in name else ""


def kind_in(url: str) -> str:
    """Return the extension; of a compressed object also the inner one, as in "json.gz"."""
    extension, path = extension_of(url), path_in(url).lower()
    bare = without_compression(path)
    inner = extension_of(bare) if bare != path else ""
    return f"{inner}.{extension}" if inner in _WAYS or inner in WHAT_BY_EXTENSION else extension


def way_round(url: str) -> str:
    way = _WAYS.get(_bare(kind_in(url)))
    return "" if way is None else f"; {way}"


@dataclass
class Survey:
    """Summary of the kinds of some names.

    Attributes:
        formats: Number of names by format.
        others: Number of names by other extension, see `kind_in`.
        media: Number of images, sounds and videos.
        tables: Tables about the other objects.
        extensions: Number of names by extension.
        folders: The first folders of the paths.
        loose: Number of names in no folder.
        is_single: True if no two consecutive names differ only in their extensions.
        digest: Hash of the paths.
    """

    formats: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    media: int = 0
    tables: list[str] = field(default_factory=list)
    extensions: dict[str, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    loose: int = 0
    is_single: bool = True
    digest: str = ""

    @property
    def is_unnamed(self) -> bool:
        """True if the first bytes must identify the objects: all have one extension of no format."""
        return not self.media and not self.formats and len(set(map(_bare, self.others))) == 1

    @property
    def is_loose(self) -> bool:
        """True if the objects are single samples: media and their companions."""
        few = {*WHAT_BY_EXTENSION, *registered_decoders(), *MEDIA}
        named = {one.removeprefix(".") for name in self.formats for one in known_formats()[name].suffixes}
        if self.media:
            return set(self.others) <= few and named <= few
        return not self.formats and bool(self.others) and set(self.others) <= few

    @property
    def text(self) -> str:
        others = Counter(self.others).most_common()
        named = ((f".{name}" if name else "without an extension", count) for name, count in others)
        counts = [*Counter(self.formats).most_common(), *named]
        shown = ", ".join(f"{count:,} {name}" for name, count in counts[:_SHOWN])
        return shown + (f" and {len(counts) - _SHOWN} other kinds" if len(counts) > _SHOWN else "")


def surveyed(names: Iterable[str], start: int) -> Survey:
    """Summarize the kinds of names. `start` is the length of the prefix before the paths."""
    found, endings, digest = Survey(), Counter[str | None](), blake2b(digest_size=8)
    suffixes = {suffix for form in known_formats().values() for suffix in form.suffixes if suffix.count(".") > 1}
    several = {one.rpartition(".")[2] for one in {*ENDINGS, *suffixes}}  # another extension may precede these
    folders, last = set[str](), None
    source = iter(names)
    while chunk := list(islice(source, _CHUNK)):
        for name in chunk:
            slash = name.rfind("/") + 1
            dot = name.find(".", slash)
            if dot < 0:
                stem, ending = name, None
            else:
                stem, ending = name[:dot] or name, name[name.rfind(".") + 1 :]
                if ending.lower() in several:
                    ending = name[dot + 1 :]
            endings[ending] += 1
            found.is_single = found.is_single and stem != last
            last = stem
            if slash > start:
                folders.add(name[start : name.index("/", start)])
            else:
                found.loose += 1
            if ending is not None and name.startswith("metadata.", slash) and TABLE.fullmatch(name, slash):
                found.tables.append(name)
        digest.update("".join([f"{name[start:]}\n" for name in chunk]).encode("utf-8", "surrogatepass"))
    _count_kinds(found, endings)
    found.folders, found.digest = sorted(folders), digest.hexdigest()
    return found


def _count_kinds(found: Survey, endings: Counter[str | None]) -> None:
    """Count formats and extensions by the part after a dot. None: there is no dot."""
    says = formats_by_names()
    formats, others, extensions = Counter[str](), Counter[str](), Counter[str]()
    for ending, count in endings.items():
        name = "x" if ending is None else f"x.{ending}"
        extensions[extension_of(name)] += count
        found.media += count if extension_of(name) in MEDIA else 0
        form = says(name)
        if form is None:
            others[kind_in(name)] += count
        else:
            formats[form.name] += count
    found.formats, found.others, found.extensions = dict(formats), dict(others), dict(extensions)


def survey_to_keep(found: Survey) -> dict[str, object] | None:
    """Convert a survey and its dependencies to JSON; None if it is too long."""
    longest = max(map(len, (found.others, found.tables, found.extensions, found.folders)))
    return {**asdict(found), "by": _known_by()} if longest <= _KEPT_MOST else None


def kept_survey(kept: object) -> Survey | None:
    if not isinstance(kept, Mapping) or kept.get("by") != _known_by():
        return None
    return Survey(**{name: value for name, value in kept.items() if name != "by"})


def _known_by() -> str:
    suffixes = sorted((name, *form.suffixes) for name, form in known_formats().items())
    return blake2b(repr((suffixes, sorted(MEDIA), sorted(ENDINGS))).encode(), digest_size=8).hexdigest()


def _bare(kind: str) -> str:
    return kind.partition(".")[0]


def only_shards(urls: Sequence[str], name: str) -> Callable[[str], bool]:
    """Return a predicate that is False for tables and statistics named like a shard beside them."""
    says = formats_by_names()
    stems = {stem_of(url) for url in urls if (form := says(url)) is not None and form.name == name}

    def is_wanted(url: str) -> bool:
        form = says(url)
        if form is not None and form.name == name:
            return True
        stem = stem_of(url)
        return stem not in stems and stem.removesuffix("_stats") not in stems

    return is_wanted


def stem_of(url: str) -> str:
    path = path_in(url)
    dot = path.find(".", path.rfind("/") + 1)
    return path[:dot] if dot > 0 else path


def without_extension(url: str) -> str:
    path = path_in(url)
    dot = path.rfind(".", path.rfind("/") + 2)
    return path[:dot] if dot > 0 else path


def mixed(place: str, kinds: Survey) -> OptionError:
    named = {known_formats()[name].suffixes[0]: count for name, count in kinds.formats.items()}
    ending = max(named, key=lambda one: named[one]) if named else f".{Counter(kinds.others).most_common(1)[0][0]}"
    return OptionError.at(
        place,
        f"has {kinds.text}: select some by a pattern such as "
        f"{masked(place.partition('*')[0].rstrip('/'))}/**/*{ending}, or by format=; pictures by a table are for "
        "hr.table(…), and files in folders by their classes for hr.folder(…)",
    )
