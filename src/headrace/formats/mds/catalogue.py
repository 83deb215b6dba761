"""What the `index.json` of a folder of MDS shards says of them."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.compression.decompressor import Decompressor
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.mds.encodings import described

NAME = "index.json"
_VERSION = 2
_SAMPLES_MOST = 2**32 - 1
_BYTES_MOST = 2**53
_KINDS = {"zstd": "zstd", "gz": "gzip", "bz2": "bzip2"}
_ODD = re.compile(r"[\x00-\x1f\\?#]|://")

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
    said = _object(url, data)
    if said.get("version") != _VERSION or not isinstance(said.get("shards"), list):
        raise _damage(url, f"it is of version {str(said.get('version'))[:20]!r}, and {_VERSION} is read")
    texts: dict[str, str] = {}  # most shards have the same columns: one text for all
    entries = []
    for number, one in enumerate(said["shards"]):
        try:
            name, shard = _shard(one, texts, limits)
        except LimitError as error:
            raise LimitError(f"{masked(url)}: shard {number}: {error.args[0]}", url=url) from None
        except ValueError as error:
            raise _damage(url, f"shard {number}: {error}") from None
        entries.append(ShardEntry(_beside(url, name), shard.samples, shard, shard.packed is not None))
    for kind in {entry.about.kind for entry in entries} - {""}:
        Decompressor(kind, url, limits)  # says now which library is missing
    return entries


def _object(url: str, data: bytes) -> dict[str, Any]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damage(url, f"it is no JSON ({str(error)[:80]})") from None
    if not isinstance(said, dict):
        raise _damage(url, "it is no JSON object")
    return said


def _shard(said: object, texts: dict[str, str], limits: Limits) -> tuple[str, Shard]:
    if not isinstance(said, dict) or said.get("format") != "mds":
        raise ValueError(f"it is of the format {str(said.get('format') if isinstance(said, dict) else said)[:40]!r}")
    samples = said.get("samples")
    if type(samples) is not int or not 0 <= samples <= _SAMPLES_MOST:
        raise ValueError(f"it has {str(samples)[:40]!r} samples")
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


def _file(said: object) -> tuple[str, File]:
    """(its name, what is said of it)."""
    if not isinstance(said, dict):
        raise ValueError("it has no file")  # noqa: TRY004 (it is the data's)
    name, nbytes, hashes = said.get("basename"), said.get("bytes"), said.get("hashes") or {}
    if not isinstance(name, str) or not name or _ODD.search(name) or name.startswith("/"):
        raise ValueError(f"its file is called {str(name)[:80]!r}")
    if ".." in name.split("/"):
        raise ValueError(f"its file {name[:80]!r} lies outside of the folder")
    if type(nbytes) is not int or not 0 <= nbytes <= _BYTES_MOST:
        raise ValueError(f"its file {name[:80]!r} has {str(nbytes)[:40]!r} bytes")
    if not isinstance(hashes, dict) or not all(isinstance(digits, str) for digits in hashes.values()):
        raise ValueError(f"the hashes of its file {name[:80]!r} are none")
    return name, File(nbytes, tuple(hashes.items()))


def _beside(url: str, name: str) -> str:
    """The address of what lies beside the catalogue; what follows its path holds for that, too."""
    end = min((at for at in (url.find("?"), url.find("#")) if at >= 0), default=len(url))
    return posixpath.dirname(url[:end]) + "/" * ("/" in url[:end]) + name + url[end:]


def _damage(url: str, why: str) -> FormatError:
    return FormatError(f"the catalogue {masked(url)} is damaged: {why}", url=url)
