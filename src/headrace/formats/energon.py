"""Folders prepared by Megatron-Energon: tar shards, with an index of samples next to each.

The folder `.nv-meta` has the shards of each split, and their numbers of samples. The file `.tar.idx` next to a shard
has u64 offsets: the first header of each sample, and the end of the last. A sample is read as the bytes between two
offsets, and the header after them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

import numpy as np

from headrace._util import check
from headrace._util.lazy import needed
from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, masked
from headrace.formats.catalogues import beside, file_name, split_path
from headrace.formats.format import Block, Catalogue, Format, ShardEntry, keys_of
from headrace.formats.index import ShardIndex, damage
from headrace.formats.json_values import as_count, as_object, as_texts
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.tar.headers import BLOCK, key_of, read_header, shown
from headrace.formats.tar.scanner import TarScanner
from headrace.types import Ints

NAME = ".nv-meta/split.yaml"
_INFO = (".info.json", ".info.yaml")
_DATASET = "dataset.yaml"
_SAMPLES_MOST = 2**40
_END_MARK = bytes(2 * BLOCK)
_REGULAR = (b"0", b"\0", b"7")


class Energon(Format):
    """A folder with `.nv-meta`, or single shards with a `.tar.idx` next to them. `split`: Name of the split."""

    name = "energon"
    suffixes = ()
    catalogue: ClassVar[str | None] = NAME

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def sniff(self, name: str, head: bytes) -> float:
        return 0.9 if name == NAME and b"split_parts" in head else 0.0

    def catalogued(self, url: str, data: bytes, limits: Limits, others: Callable[[str], bytes | None]) -> Catalogue:
        return _catalogue_of(url, data, self.split, others)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        offsets, whole = await offsets_in(reads, shard, limits)
        count = len(offsets) - 1
        rows = Rows(
            keys_of(np.arange(count)),
            np.arange(count + 1) * 2,
            np.tile(np.arange(2, dtype=np.int32), count),
            np.repeat(offsets, 2)[1:-1],
            np.stack([np.diff(offsets), np.full(count, BLOCK)], 1).reshape(-1),
            ("members", "behind"),
        )
        return ShardIndex(rows, None, whole.size, whole.etag)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        data, behind = bodies
        scanner = TarScanner(block.url, block.limits)
        begun = scanner.feed(memoryview(data), 0, last=False)
        is_one = not len(begun) and scanner.next_header == len(data)
        rows = scanner.feed(_END_MARK, len(data), last=True) if is_one and not scanner.done else begun
        index = index_of(block.url).rpartition("/")[2]
        if scanner.error is not None:
            why = str(scanner.error.args[0]).rpartition(" (")[0]
            raise ValueError(f"of the bytes that {index} has at {scanner.error.offset}: {why}")
        if not is_one or len(rows) != 1 or _goes_on(rows.keys[0].item(), behind):
            raise ValueError(
                f"its bytes by {index} are not one sample, all of it: that is the index of another archive"
            )
        places = zip(rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        return [{rows.fields[field]: data[at : at + size] for field, at, size in places}]


def _goes_on(key: bytes, behind: bytes) -> bool:
    """True if the header after a sample is invalid, or that of another of its members.

    This detects wrong offsets: if one sample lacks its first members, the sample before has them at its end.
    """
    if not any(behind):
        return False  # the end mark
    try:
        header = read_header(behind, BLOCK)
    except FormatError:
        return True
    return header.kind in _REGULAR and key_of(header.name) == key.decode("utf-8", "surrogateescape")


ENERGON = Energon()


_FIRST_BYTES = 64 * 1024
_BYTES_MOST = 2**53


def index_of(url: str) -> str:
    """Return the URL of the index next to the shard at `url`, with the same query."""
    path, rest = split_path(url)
    return path + ".idx" + rest


async def offsets_in(reads: Reads, shard: ShardEntry, limits: Limits) -> tuple[Ints, PinnedObject]:
    """Return the starts of samples and the end of the last, and the shard in the version that was read.

    The first sample includes all bytes before the second, as members of no sample may precede it. A FormatError names
    an index that is damaged, or belongs to another archive.
    """
    place, whole = index_of(shard.url), PinnedObject(reads, shard.url)
    try:
        offsets = await _read(reads, place, limits)
        if shard.samples is not None and len(offsets) - 1 != shard.samples:
            raise ValueError(f"it has {len(offsets) - 1} samples, and {shard.samples} are counted in .nv-meta")
        await whole.read(0, 1)
        end = int(offsets[-1])
        if end + BLOCK > whole.size:
            raise ValueError(f"its samples end at byte {end} of {whole.size} of {masked(shard.url)}")
        if any(await whole.read(end, BLOCK)):
            raise ValueError(f"at byte {end}, where its samples end, there is no end mark in {masked(shard.url)}")
    except ValueError as error:
        raise FormatError(
            f"the index {masked(place)} is damaged, or of another archive: {error}; `energon prepare` makes a new one",
            url=place,
        ) from None
    offsets[0] = 0
    check_bytes("a sample", int(np.diff(offsets).max(initial=0)), limits.member_bytes, url=shard.url)
    return offsets, whole


async def _read(reads: Reads, place: str, limits: Limits) -> Ints:
    index = PinnedObject(reads, place)
    await index.head(_FIRST_BYTES)
    check_bytes("all of it", index.size, limits.member_bytes, url=place)
    if index.size % 8 or not index.size:
        raise ValueError(f"it has {index.size} bytes, which is no multiple of 8")
    said = np.frombuffer(await index.head(index.size), "<u8")
    if int(said.max()) > _BYTES_MOST:
        raise ValueError(f"entry {int(said.argmax())} is {int(said.max())}")
    offsets = said.astype(np.int64)
    if (offsets % BLOCK).any():
        raise ValueError(f"entry {int((offsets % BLOCK != 0).argmax())} is no multiple of {BLOCK}")
    if (np.diff(offsets) <= 0).any():
        raise ValueError(f"entry {int((np.diff(offsets) <= 0).argmax()) + 1} does not follow the one before it")
    return offsets


def _catalogue_of(url: str, data: bytes, split: str, others: Callable[[str], bytes | None]) -> Catalogue:
    """Return the shards of a split, in order. `others` reads a file next to `url` by its name."""
    said = _parsed(data, url)
    splits = as_object(said.get("split_parts"))
    patterns = None if splits is None else as_texts(splits.get(split, []))
    excluded = as_texts(said.get("exclude") or [])
    if splits is None or patterns is None or excluded is None:
        raise damage(url, "its split_parts and exclude are not lists of shards by the names of splits")
    check.one_of(f"{masked(url)}: split", split, splits)
    counts, info = _counts(url, others)
    without = set(_expanded(excluded, len(counts), url))
    single = next((name for name in sorted(without) if name not in counts), None)
    if single is not None:
        raise FormatError.at(
            url,
            f"excludes {single[:200]!r}, which is no shard of {masked(info)}: single samples are not "
            "skipped here; remove the entry, and drop the sample by .filter()",
        )
    names = [name for name in _expanded(patterns, len(counts), url) if name not in without]
    missing = next((name for name in names if name not in counts), None)
    if missing is not None:
        raise damage(url, f"its split {split!r} has {missing[:200]!r}, which {masked(info)} does not count")
    entries = [ShardEntry(_address(url, name), counts[name]) for name in names]
    more = ", ".join(repr(name) for name in splits if name != split)
    shown_split = f"{split!r}" + (f"; there are {more} too" if more else "")[:300]
    return Catalogue(entries, (("split", shown_split), *_told_by_dataset(url, others)))


def _counts(url: str, others: Callable[[str], bytes | None]) -> tuple[dict[str, int], str]:
    for name in _INFO:
        data, place = others(name), beside(url, name)
        if data is None:
            continue
        said = as_object(_parsed(data, place).get("shard_counts"))
        counts = {} if said is None else {name: as_count(count, _SAMPLES_MOST) for name, count in said.items()}
        wrong = next((name for name, count in counts.items() if count is None), None)
        if said is None or wrong is not None:
            raise damage(place, "it has no shard_counts" if said is None else f"it counts no samples of {wrong!r:.200}")
        return {str(name): count or 0 for name, count in counts.items()}, place
    raise FormatError.at(url, f": neither {' nor '.join(_INFO)} is beside it; `energon prepare` writes it")


def _address(url: str, name: str) -> str:
    """Return the URL of a shard, whose name is relative to the parent of `.nv-meta`."""
    try:
        checked = file_name(name)
    except ValueError as error:
        raise damage(url, str(error)) from None
    if not checked.endswith(".tar"):
        raise FormatError.at(url, f"has the shard {name[:200]!r}: plain archives, .tar, are read")
    end = url.rfind(NAME)
    return url[:end] + checked + url[end + len(NAME) :]


def _told_by_dataset(url: str, others: Callable[[str], bytes | None]) -> tuple[tuple[str, str], ...]:
    """Return descriptions of the settings in `dataset.yaml` that are not applied."""
    data = others(_DATASET)
    if data is None:
        return ()
    said = _parsed(data, beside(url, _DATASET))
    kind = said.get("sample_type", said)
    name = kind.get("__class__") if isinstance(kind, dict) else None
    parts = [f"samples come as their members, and not as {name}"] if name else []
    if isinstance(said.get("sample_loader"), str):
        parts.append(f"{said['sample_loader']} is not run: call what it does in .map()")
    renamed = as_object(said.get("field_map"))
    if renamed is not None:
        fields = ", ".join(f"{new}={old}" for new, old in renamed.items())
        parts.append(f"the field_map ({fields}) is not applied: .rename() does it")
    return ((_DATASET, shown("; ".join(parts).encode()).strip("'\"")),) if parts else ()


def _expanded(patterns: list[str], most: int, url: str) -> Iterator[str]:
    library = needed("braceexpand", "energon", masked(url))
    for pattern in patterns:
        try:
            yield from islice(library.braceexpand(pattern), most + 1)
        except ValueError:
            raise damage(url, f"the braces of {pattern[:200]!r} do not match") from None


def _parsed(data: bytes, url: str) -> dict[str, object]:
    yaml = None if url.endswith(".json") else needed("yaml", "energon", masked(url))
    try:
        loader = None if yaml is None else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        said = as_object(json.loads(data) if yaml is None else yaml.load(data, loader))
    except (ValueError, RecursionError) as error:
        raise damage(url, f"it cannot be parsed ({str(error)[:80]})") from None
    except Exception as error:  # YAML's errors
        raise damage(url, f"it is no YAML ({' '.join(str(error).split())[:200]})") from None
    if said is None:
        raise damage(url, "it is no object")
    return said
