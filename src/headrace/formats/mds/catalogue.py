"""What the `index.json` of a folder of MDS shards says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import LimitError, masked
from headrace.formats.compression.decompressor import Decompressor
from headrace.formats.folders import beside, catalogue_damage, catalogue_object, file_name
from headrace.formats.format import ShardEntry
from headrace.formats.json_values import as_count, as_list, as_object, as_texts
from headrace.formats.limits import Limits
from headrace.formats.mds.encodings import described

NAME = "index.json"
_VERSION = 2
_SAMPLES_MOST = 2**32 - 1
_BYTES_MOST = 2**53
_KINDS = {"zstd": "zstd", "gz": "gzip", "bz2": "bzip2"}

Hashes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class File:
    """A shard as one of its files: its bytes, and (algorithm, hexadecimal digits) of what they hash to."""

    nbytes: int
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Shard:
    """What is said of a shard.

    Attributes:
        columns: as `described` has them.
        raw: the shard itself.
        packed: the same compressed, which is what lies there then; None where it is not compressed.
        kind: how, as `Decompressor` calls it.
    """

    columns: str
    samples: int
    raw: File
    packed: File | None = None
    kind: str = ""


def listed(url: str, data: bytes, limits: Limits) -> Sequence[ShardEntry]:
    """The shards that the catalogue at `url` names, in its order.

    Raises:
        FormatError, LimitError: it is damaged, or has shards that are not read here.
    """
    said = catalogue_object(url, data)
    shards = as_list(said.get("shards"))
    if said.get("version") != _VERSION or shards is None:
        raise catalogue_damage(url, f"it is of version {str(said.get('version'))[:20]!r}, and {_VERSION} is read")
    texts: dict[str, str] = {}  # most shards have the same columns: one text for all
    entries = []
    for number, one in enumerate(shards):
        try:
            name, shard = _shard(one, texts, limits)
        except LimitError as error:
            raise LimitError(f"{masked(url)}: shard {number}: {error.args[0]}", url=url) from None
        except ValueError as error:
            raise catalogue_damage(url, f"shard {number}: {error}") from None
        entries.append(ShardEntry(beside(url, name), shard.samples, shard, shard.packed is not None))
    for kind in {entry.about.kind for entry in entries} - {""}:
        Decompressor(kind, url, limits)  # says now which library is missing
    return entries


def _shard(one: object, texts: dict[str, str], limits: Limits) -> tuple[str, Shard]:
    said = as_object(one)
    if said is None or said.get("format") != "mds":
        raise ValueError(f"it is of the format {str(one if said is None else said.get('format'))[:40]!r}")
    samples = as_count(said.get("samples"), _SAMPLES_MOST)
    if samples is None:
        raise ValueError(f"it has {str(said.get('samples'))[:40]!r} samples")
    lists = [said.get(f"column_{what}") for what in ("names", "encodings", "sizes")]
    known = repr(lists)
    columns = texts.get(known) or texts.setdefault(known, described(*lists))
    name, raw = _file(said.get("raw_data"))
    if 4 * (samples + 2) > raw.nbytes:
        raise ValueError(f"{samples} samples do not fit into {raw.nbytes} bytes")
    if said.get("zip_data") is None:
        return name, Shard(columns, samples, raw)
    name, packed = _file(said["zip_data"])
    algorithm = str(said.get("compression")).partition(":")[0]
    if algorithm not in _KINDS:
        raise ValueError(f"it is compressed by {algorithm[:40]!r}; of {', '.join(_KINDS)} it is unpacked here")
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * packed.nbytes)
    if raw.nbytes > most:
        raise LimitError(f"{packed.nbytes} bytes would unpack to {raw.nbytes}, over the limit of {most}")
    return name, Shard(columns, samples, raw, packed, _KINDS[algorithm])


def _file(one: object) -> tuple[str, File]:
    """(its name, what is said of it)."""
    said = as_object(one)
    if said is None:
        raise ValueError("it has no file")
    name, nbytes = file_name(said.get("basename")), as_count(said.get("bytes"), _BYTES_MOST)
    if nbytes is None:
        raise ValueError(f"its file {name[:80]!r} has {str(said.get('bytes'))[:40]!r} bytes")
    hashes = as_object(said.get("hashes") or {})
    digits = None if hashes is None else as_texts([*hashes.values()])
    if hashes is None or digits is None:
        raise ValueError(f"the hashes of its file {name[:80]!r} are none")
    return name, File(nbytes, tuple(zip(hashes, digits, strict=True)))
