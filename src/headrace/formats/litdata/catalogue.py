"""Parses LitData's `index.json`, which lists the chunks or the Parquet files of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace._util.reads import Version
from headrace.errors import OptionError, masked
from headrace.formats.compression import Decompressor
from headrace.formats.folders import beside, catalogue_damage, catalogue_entry, catalogue_object, file_name
from headrace.formats.format import ShardEntry
from headrace.formats.json_values import as_count, as_list, as_object, as_text, as_texts
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.litdata.trees import tree_of
from headrace.formats.tables import ListedTable

NAME = "index.json"
PARQUET_LOADER = "ParquetLoader"
_SAMPLES_MOST = 2**32 - 1
_BYTES_MOST = 2**53
_PLAIN = ("str", "int", "float", "bool", "bytes", "null", "list", "map", "struct")
_DEPTH_MOST = 50


@dataclass(frozen=True, slots=True)
class ItemChunk:
    """A chunk in the catalogue.

    Attributes:
        formats, spec: Description of the items, for `tree_of`.
        nbytes: Size. For a chunk that is compressed as a whole: decompressed size.
        packing: Unit of compression: "chunk", "batch", "sample", or "" for none.
    """

    formats: str
    spec: str
    samples: int
    nbytes: int
    packing: str


class Said(NamedTuple):
    loader: str
    config: dict[str, object]
    chunks: list[object]


def said_by(url: str, data: bytes) -> Said:
    said = catalogue_object(url, data)
    chunks, config = as_list(said.get("chunks")), as_object(said.get("config"))
    if chunks is None or config is None:
        raise catalogue_damage(url, "it has no chunks, or no config")
    return Said(as_text(config.get("item_loader")) or "PyTreeLoader", config, chunks)


def tables(url: str, said: Said) -> Sequence[ShardEntry]:
    if said.config.get("compression") is not None or said.config.get("encryption") is not None:
        raise catalogue_damage(
            url, "its Parquet files would be compressed or encrypted as a whole, and LitData's never are"
        )
    entries = list[ShardEntry]()
    for number, one in enumerate(said.chunks):
        with catalogue_entry(url, f"chunk {number}"):
            chunk = as_object(one) or {}
            rows, nbytes = _sizes(chunk)
            name = file_name(chunk.get("filename"))
        about = ListedTable(rows, nbytes, masked(url))
        entries.append(ShardEntry(beside(url, name), about=about, version=Version(nbytes, None, "listed")))
    return entries


def listed(url: str, data: bytes, unpickle: tuple[str, ...], limits: Limits) -> Sequence[ShardEntry]:
    loader, config, chunks = said_by(url, data)
    if loader != "PyTreeLoader":
        why = "it holds tokens, which hr.tokens reads" if loader == "TokensLoader" else "that is not read"
        raise OptionError.at(url, f"is made for LitData's {loader[:80]}: {why}")
    types = as_object(config.get("types")) or {}
    are_rows = bool(types) and all(_is_plain(one, 0) for one in types.values())  # LitData appends an Arrow table
    try:
        formats, spec, packing = _config(config)
        tree_of(formats, spec, unpickle, limits)
    except ValueError as error:
        raise catalogue_damage(url, str(error)) from None
    entries = []
    for number, one in enumerate(chunks):
        with catalogue_entry(url, f"chunk {number}"):
            entries.append(_entry(url, as_object(one) or {}, (formats, spec, packing), are_rows, limits))
    if packing:
        Decompressor("zstd", url, limits)  # raises early if the library is not installed
    return entries


def _config(config: dict[str, object]) -> tuple[str, str, str]:
    names, spec = as_texts(config.get("data_format")), as_text(config.get("data_spec"))
    if config.get("encryption") is not None:
        raise ValueError("its chunks are encrypted, and that is not read")
    if names is None or spec is None:
        raise ValueError("it does not describe its items")
    compression = config.get("compression")
    packing = "chunk" if config.get("compression_level") is None else str(config["compression_level"])
    if compression is None:
        packing = ""
    elif str(compression).partition(":")[0] != "zstd":
        raise ValueError(f"its chunks are compressed by {str(compression)[:40]!r}; zstd is unpacked here")
    elif packing not in ("chunk", "batch", "sample"):
        raise ValueError(f"its chunks are compressed by {packing[:40]!r}, which is not known")
    return json.dumps(names), spec, packing


def _entry(
    url: str, said: dict[str, object], config: tuple[str, str, str], are_rows: bool, limits: Limits
) -> ShardEntry:
    samples, nbytes = _sizes(said)
    formats, spec, packing = config
    if packing == "chunk":
        check_bytes("its content", nbytes, limits.member_bytes)
    chunk = ItemChunk(formats, spec, samples, nbytes, packing)
    shares_blocks = are_rows or packing in ("chunk", "batch")
    return ShardEntry(beside(url, file_name(said.get("filename"))), samples, chunk, shares_blocks)


def _sizes(said: dict[str, object]) -> tuple[int, int]:
    samples, nbytes = as_count(said.get("chunk_size"), _SAMPLES_MOST), as_count(said.get("chunk_bytes"), _BYTES_MOST)
    if samples is None or nbytes is None:
        sizes = f"{str(said.get('chunk_size'))[:40]!r} items, {str(said.get('chunk_bytes'))[:40]!r} bytes"
        raise ValueError(f"it has {sizes}")
    return samples, nbytes


def _is_plain(kind: object, depth: int) -> bool:
    said = as_object(kind)
    if said is None or depth > _DEPTH_MOST:
        return as_text(kind) in _PLAIN
    parts = [*(as_object(said.get("fields")) or {}).values(), said.get("value") or "str"]
    return as_text(said.get("type")) in _PLAIN and all(_is_plain(one, depth + 1) for one in parts)
