"""The LitData format. Items that are compressed together share a block.

Samples are built from the leaves of items, by the tree that torch's pytree has written.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.arrow_values import arrow_errors, library
from headrace.formats.catalogues import beside, catalogue_damage, catalogue_entry, catalogue_object, file_name
from headrace.formats.compression import Decompressor, unpacked
from headrace.formats.decoders import decode_json, decode_text
from headrace.formats.format import (
    Block,
    Catalogue,
    CutRows,
    Format,
    ShardEntry,
    errors_named,
    keys_of,
    rows_of_members,
    rows_of_one_block,
)
from headrace.formats.index import ShardIndex
from headrace.formats.json_values import as_count, as_list, as_object, as_text, as_texts
from headrace.formats.limits import DEFAULTS, Limits, check_bytes
from headrace.formats.mds import MdsColumn, image_array, offsets_of, raw_image, table_bytes, values_of
from headrace.formats.parquet.format import PARQUET, Parquet
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.tables import ListedTable
from headrace.types import Buffer, Ints

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


def tables_listed(url: str, said: Said) -> Sequence[ShardEntry]:
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


def items_listed(url: str, said: Said, unpickle: tuple[str, ...], limits: Limits) -> Sequence[ShardEntry]:
    loader, config, chunks = said
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
            about = as_object(one) or {}
            samples, nbytes = _sizes(about)
            if packing == "chunk":
                check_bytes("its content", nbytes, limits.member_bytes)
            chunk = ItemChunk(formats, spec, samples, nbytes, packing)
            place = beside(url, file_name(about.get("filename")))
            entries.append(ShardEntry(place, samples, chunk, are_rows or packing in ("chunk", "batch")))
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


_AT_FIRST = 4 * 2**20
_MAGIC, _VERSION = b"LDFZ01\0\0", 1
_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("packed", "<u4"), ("unpacked", "<u4")])
_ARROW, _ARROW_END = b"LDARW01\0", 12


class LitData(Format):
    """A folder with LitData's `index.json`, for LitData's chunks or for Parquet files.

    Args:
        unpickle: Fields whose pickles are loaded. Loading a pickle executes code from the data.
        parquet: Format of the Parquet files that `index_parquet_dataset` has indexed.
    """

    name = "litdata"
    suffixes = ()
    catalogue = NAME

    def __init__(self, unpickle: Sequence[str] = (), *, parquet: Parquet = PARQUET) -> None:
        self.unpickle = (unpickle,) if isinstance(unpickle, str) else tuple(unpickle)
        self.parquet = parquet

    def sniff(self, name: str, head: bytes) -> float:
        begins_so = name == NAME and head.lstrip()[:1] == b"{"
        return 0.8 if begins_so and b'"chunk_bytes"' in head and b'"shards"' not in head else 0.0

    def catalogued(self, url: str, data: bytes, limits: Limits, others: Callable[[str], bytes | None]) -> Catalogue:
        said = said_by(url, data)
        if said.loader == PARQUET_LOADER:
            return Catalogue(tables_listed(url, said), form=self.parquet)
        return Catalogue(items_listed(url, said, self.unpickle, limits))

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        said: ItemChunk | None = shard.about
        if said is None:
            raise FormatError.at(shard.url, ": only its index.json describes its content: give that")
        how = {"chunk": _index_of_whole, "batch": _index_of_frames}.get(said.packing, _index_of_items)
        with errors_named(shard.url):
            return await how(reads, shard.url, said, limits)

    def gives_tensors(self, entries: Sequence[ShardEntry]) -> bool:
        return bool(self.unpickle) or any("tensor" in entry.about.formats for entry in entries[:1])

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        how, formats, spec, samples, nbytes = _said(block.members[0])
        if how == "arrow":
            return _arrow_rows(bodies[0], samples)
        tree = tree_of(formats, spec, self.unpickle, block.limits)
        if how == "item":
            return [tree.sample(bodies[0])]
        if how == "sample":
            return [tree.sample(bytes(unpacked("zstd", bodies[0], block.url, block.limits)))]
        is_whole = how == "chunk"
        data = unpacked("zstd", bodies[0], block.url, block.limits, nbytes if is_whole else None)
        offsets = offsets_of(data, samples, len(data), block.limits) if is_whole else _offsets_in(data, tree, samples)
        return CutRows(data, offsets, tree.sample)


LITDATA = LitData()


def _field(how: str, said: ItemChunk, samples: int = 0, nbytes: int = 0) -> str:
    return json.dumps([how, said.formats, said.spec, samples, nbytes], separators=(",", ":"))


@lru_cache(maxsize=256)
def _said(field: str) -> tuple[str, str, str, int, int]:
    how, formats, spec, samples, nbytes = json.loads(field)
    return how, formats, spec, samples, nbytes


async def _index_of_items(reads: Reads, url: str, said: ItemChunk, limits: Limits) -> ShardIndex:
    """Return the index of separate items, or of the Arrow table that may follow them."""
    wanted = table_bytes(said.samples, limits)
    shard = PinnedObject(reads, url)
    head = await shard.head(min(wanted, _AT_FIRST))
    head = await shard.head(min(wanted, shard.size))
    if shard.size != said.nbytes and said.packing == "":
        raise ValueError(f"it has {shard.size} bytes, and its catalogue lists {said.nbytes}")
    end = int.from_bytes(head[wanted - 4 : wanted], "little") if len(head) == wanted else shard.size
    offsets = offsets_of(head, said.samples, min(end, shard.size), limits)
    if end < shard.size:
        return await _index_of_arrow(shard, said, end, limits)
    field = _field(said.packing or "item", said)
    rows = rows_of_members(keys_of(np.arange(said.samples)), offsets[:-1], np.diff(offsets), field)
    return ShardIndex(rows, None, shard.size, shard.etag)


async def _index_of_arrow(shard: PinnedObject, said: ItemChunk, start: int, limits: Limits) -> ShardIndex:
    end = await shard.read(-_ARROW_END, _ARROW_END)
    length = int.from_bytes(end[:4], "little")
    if bytes(end[4:]) != _ARROW or start + length + _ARROW_END != shard.size:
        raise ValueError(f"{shard.size - start} bytes follow its items, and they are no table of Arrow")
    check_bytes("its table of Arrow", length, limits.member_bytes)
    return ShardIndex(_one_block(said, start, length, "arrow"), None, shard.size, shard.etag)


async def _index_of_whole(reads: Reads, url: str, said: ItemChunk, limits: Limits) -> ShardIndex:
    shard = PinnedObject(reads, url)
    await shard.read(0, 1)
    limits.check_unpacked(shard.size, said.nbytes)
    check_bytes("it", max(said.nbytes, shard.size), limits.member_bytes)
    return ShardIndex(_one_block(said, 0, shard.size, "chunk"), None, shard.size, shard.etag)


def _one_block(said: ItemChunk, start: int, size: int, how: str) -> Rows:
    return rows_of_one_block(said.samples, start, size, _field(how, said, said.samples, said.nbytes))


async def _index_of_frames(reads: Reads, url: str, said: ItemChunk, limits: Limits) -> ShardIndex:
    shard = PinnedObject(reads, url)
    head = await shard.head(_HEAD.size)
    if len(head) < _HEAD.size:
        raise ValueError("it is cut off in its head")
    magic, version, flags, count, per_frame, frames = _HEAD.unpack(head)
    if (magic, version, flags) != (_MAGIC, _VERSION, 0) or as_count(count, said.samples) != said.samples:
        raise ValueError(f"it begins with {bytes(head[:12])!r} and has {count} items; {said.samples} were announced")
    if shard.size != said.nbytes:
        raise ValueError(f"it has {shard.size} bytes, and its catalogue lists {said.nbytes}")
    at = _HEAD.size + 4 * (count + 1)
    end = at + _FRAME.itemsize * frames
    if not count or not per_frame or frames != -(-count // per_frame) or end > shard.size:
        raise ValueError(f"it has {frames} frames of {per_frame} items for {count} in {shard.size} bytes")
    check_bytes("its head", end, limits.member_bytes)
    head = await shard.head(end)
    items = np.frombuffer(head, "<u4", count + 1, _HEAD.size).astype(np.int64)
    table = np.frombuffer(head, _FRAME, frames, at)
    rows = _rows_of_frames(said, per_frame, items, table, limits)
    ends = rows.offset + rows.size
    if int(rows.offset[0]) != end or int(ends[-1]) != shard.size or (ends[:-1] != rows.offset[1:]).any():
        raise ValueError("its frames do not follow one another, to its end")
    return ShardIndex(rows, None, shard.size, shard.etag)


def _rows_of_frames(said: ItemChunk, per_frame: int, items: Ints, table: NDArray[np.void], limits: Limits) -> Rows:
    count, frames = len(items) - 1, len(table)
    first = np.arange(frames) * per_frame
    stop = np.minimum(first + per_frame, count)
    sizes = table["unpacked"].astype(np.int64)
    if (table["first"] != first).any() or (table["items"] != stop - first).any() or (table["offset"] > 2**53).any():
        raise ValueError("its table of frames does not have its items")
    if items[0] or (np.diff(items) < 0).any() or (items[stop] - items[first] != sizes).any():
        raise ValueError("its items do not follow one another in its frames")
    check_bytes("an unpacked frame", int(sizes.max()), limits.member_bytes)
    fields = (_field("batch", said, per_frame), _field("batch", said, int(stop[-1] - first[-1])))
    field = np.zeros(frames, np.int32)
    field[-1] = fields[0] != fields[1]
    return Rows(
        keys_of(np.arange(count)),
        np.arange(frames + 1),
        field,
        table["offset"].astype(np.int64),
        table["packed"].astype(np.int64),
        fields[: 1 + int(field[-1])],
        block=np.arange(count) // per_frame,
        row=np.arange(count) % per_frame,
    )


def _offsets_in(data: Buffer, tree: Tree, samples: int) -> Ints:
    """Return the starts of a frame's items and the end of the last, from the sizes in each."""
    offsets = [0]
    for _ in range(samples):
        offsets.append(tree.end_at(data, offsets[-1]))
    if offsets[-1] != len(data):
        raise ValueError(f"the items of a frame end at byte {offsets[-1]} of {len(data)}")
    return np.array(offsets)


def _arrow_rows(data: bytes, samples: int) -> Sequence[dict[str, object]]:
    try:
        pa = library()
    except ImportError as error:
        raise FormatError(str(error)) from error
    with arrow_errors("its table of Arrow is damaged"):
        source = pa.py_buffer(data)
        reader = pa.ipc.open_file(source) if data[:6] == b"ARROW1" else pa.ipc.open_stream(source)
    with arrow_errors():
        table = reader.read_all()
        table.validate(full=True)
        rows: list[dict[str, object]] = table.to_pylist()
    if len(rows) != samples or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"its table of Arrow has {len(rows)} rows, and its catalogue lists {samples}")
    return rows


Decode = Callable[[bytes], object]

# by LitData's number of the dtype
_TORCH = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)
_DIMENSIONS_MOST = 64
_NONE = re.compile(rb"\x80[\x02-\x05]N\.")
_FILES = ("bytes", "jpeg", "image", "file", "audio", "video", "nifti", "mesh", "pdf", "tifffile", "tiff", "png")


def leaf_decoder(name: str, where: str, limits: Limits, *, is_unpickled: bool) -> Decode:
    """Return the decoder for a serializer, or raise a ValueError. `where`: the leaf's path."""
    kind = name.partition(":")[0]
    plain: dict[str, Decode] = {
        **dict.fromkeys(_FILES, bytes),
        "str": decode_text,
        "text": decode_text,
        "int": partial(_one, struct.Struct("<q")),
        "float": partial(_one, struct.Struct("<d")),
        "bool": _bool,
        "none": _none,
        "json": nested_value,
        "pil": partial(raw_image, limits),
        "jpeg_array": image_array,
        "tensor": partial(_with_shape, ">", _tensor),
        "numpy": partial(_with_shape, "<", _array),
        "pickle": pickle.loads if is_unpickled else partial(_pickle, where),
    }
    if kind in plain:
        return plain[kind]
    if (dtype := vector_dtype(name)) is not None:
        return partial(_vector, partial(_tensor if kind == "no_header_tensor" else _array, dtype), dtype)
    raise ValueError(f"leaf {where!r} is written by the serializer {name[:80]!r}, which is not known")


def vector_dtype(name: str) -> str | None:
    """Return the dtype of vectors without a header. None for other serializers. Raises a ValueError if unknown."""
    kind, _, more = name.partition(":")
    names = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}.get(kind)
    return _named(names, int(more[:9])) if names is not None and more.isdigit() else None


def _one(layout: struct.Struct, data: bytes) -> object:
    if len(data) != layout.size:
        raise ValueError(f"it has {len(data)} bytes")
    return layout.unpack(data)[0]


def _bool(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError(f"it is {data[:9]!r}")
    return data == b"\1"


def _none(data: bytes) -> None:
    if data:
        raise ValueError(f"it has {len(data)} bytes")


def _pickle(where: str, data: bytes) -> None:
    """Accept a pickled None, which LitData writes, and refuse all else."""
    if not _NONE.fullmatch(data):
        raise ValueError(
            f"it is pickled: reading it would run code from the data. If you trust their author, give "
            f"format=LitData(unpickle=({where!r},)), of headrace.formats.litdata.format"
        )


def _named(names: tuple[str, ...], number: int) -> str:
    if number >= len(names):
        raise ValueError(f"its dtype has the number {number}, which is not known")
    return names[number]


def _with_shape(order: str, make: Callable[[str, tuple[int, ...], bytes], object], data: bytes) -> object:
    """Decode a tensor or array that follows the number of its dtype, its rank and its shape."""
    dtype, rank = struct.unpack_from(f"{order}2I", data) if len(data) >= 8 else (0, _DIMENSIONS_MOST)
    at = 8 + 4 * rank
    if rank >= _DIMENSIONS_MOST or at > len(data):
        raise ValueError("its shape is cut off")
    return make(
        _named(_TORCH if order == ">" else _NUMPY, dtype), struct.unpack_from(f"{order}{rank}I", data, 8), data[at:]
    )


def _vector(make: Callable[[tuple[int], bytes], object], dtype: str, data: bytes) -> object:
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if len(data) % size:
        raise ValueError(f"it has {len(data)} bytes, which are no whole number of {dtype}")
    return make((len(data) // size,), data)


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    from headrace.formats.safetensors import tensor_of

    return tensor_of(dtype, shape, data)


def _array(dtype: str, shape: tuple[int, ...], data: bytes) -> object:
    kind = np.dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"its shape {list(shape)} does not take the {len(data)} bytes that follow")
    return np.frombuffer(data, kind).reshape(shape).copy()


_U32, _I64, _F64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_TAGS_END = 0x20  # larger bytes are characters that JSON begins with
_OF_RECORDS = 0x10


def nested_value(data: bytes) -> object:
    if not data or data[0] > _TAGS_END:
        return decode_json(data)
    cursor = _Cursor(data)
    value = cursor.value(0)
    if cursor.at != len(data):
        raise ValueError(f"{len(data) - cursor.at} bytes follow its value")
    return value


class _Cursor:
    """Reads consecutive values. Counts are checked against the remaining bytes before use.

    u8 tag, then: 0 JSON (u32 bytes), 1 strings (u32 count; each u32 bytes), 2 i64, 3 f64, 4 bools (u32 count), 5 a dict
    (u32 count; of each a key, u32 bytes, and a value), 6 records (u32 count, u32 keys, keys; then the values of each,
    whose tags are 16 none, 17 string, 18 i64, 19 f64, 20 bool), 7 string, 8 i64, 9 f64, 10 bool, 11 none.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self._readers: dict[int, Callable[[], object]] = {
            0: lambda: decode_json(self._take(self._count())),
            1: lambda: [self._text() for _ in range(self._count(4))],
            2: lambda: self._numbers("<i8"),
            3: lambda: self._numbers("<f8"),
            4: lambda: self._numbers("?"),
            6: self._records,
            7: self._text,
            8: lambda: self._one(_I64),
            9: lambda: self._one(_F64),
            10: lambda: self._take(1) != b"\0",
            11: lambda: None,
        }
        self._of_records = {_OF_RECORDS + k: self._readers[tag] for k, tag in enumerate((11, 7, 8, 9, 10))}

    def value(self, depth: int) -> object:
        tag = self._take(1)[0]
        if tag == 5 and depth < _TREE_DEPTH_MOST:
            return {self._text(): self.value(depth + 1) for _ in range(self._count(5))}
        return self._tagged(tag, self._readers)

    def _tagged(self, tag: int, readers: dict[int, Callable[[], object]]) -> object:
        if tag not in readers:
            raise ValueError(f"it has a value of the kind {tag}, or too deep a one")
        return readers[tag]()

    def _take(self, size: int) -> bytes:
        part = self._data[self.at : self.at + size]
        if len(part) < size:
            raise ValueError("it is cut off in a value")
        self.at += size
        return part

    def _count(self, least: int = 0) -> int:
        """Read a number of elements of at least `least` bytes each."""
        (count,) = _U32.unpack(self._take(4))
        if count * least > len(self._data) - self.at:
            raise ValueError(f"it claims {count} values, and {len(self._data) - self.at} bytes are left")
        return int(count)

    def _text(self) -> str:
        return str(self._take(self._count()), "utf-8")

    def _one(self, layout: struct.Struct) -> object:
        return layout.unpack(self._take(layout.size))[0]

    def _numbers(self, dtype: str) -> object:
        kind = np.dtype(dtype)
        data = self._take(self._count(kind.itemsize) * kind.itemsize)
        return (np.frombuffer(data, np.uint8) != 0 if dtype == "?" else np.frombuffer(data, kind)).tolist()

    def _records(self) -> object:
        count = self._count()
        keys = [self._text() for _ in range(self._count(4))]
        if not keys or count * len(keys) > len(self._data) - self.at:
            raise ValueError(f"it claims {count} records of {len(keys)} values, and too few bytes are left")
        return [{key: self._tagged(self._take(1)[0], self._of_records) for key in keys} for _ in range(count)]


Build = Callable[[Iterator[object]], object]

_TREE_VERSION = 1
_TREE_DEPTH_MOST = 100
_DICTS = ("builtins.dict", "collections.OrderedDict")
_SEQUENCES: dict[str, Callable[[list[object]], object]] = {"builtins.list": list, "builtins.tuple": tuple}
ALONE = "value"


class Tree(NamedTuple):
    """The leaves of items, and a builder of samples from their values."""

    leaves: tuple[MdsColumn, ...]
    build: Build

    def sample(self, data: bytes) -> dict[str, object]:
        """Decode an item to a sample. A ValueError names the damaged leaf."""
        sample = self.build(iter(values_of(self.leaves, data, "leaf")))
        assert isinstance(sample, dict)
        return sample

    def end_at(self, data: Buffer, at: int) -> int:
        begin = at + 4 * len(self.leaves)
        end = begin
        if begin <= len(data):
            end += sum(struct.unpack_from(f"<{len(self.leaves)}I", data, at))
        if end > len(data) or begin > len(data):
            raise ValueError("an item is cut off")
        return end


@lru_cache(maxsize=64)
def tree_of(formats: str, spec: str, unpickle: tuple[str, ...] = (), limits: Limits = DEFAULTS) -> Tree:
    """Return the tree of leaves. `formats` is JSON. Raises a ValueError if not supported."""
    names = as_texts(json.loads(formats))
    said = as_list(decode_json(spec.encode()))
    if names is None or said is None or len(said) != 2 or said[0] != _TREE_VERSION:
        raise ValueError("its data_format and data_spec are none that are known")
    if len(names) > limits.fields:
        raise ValueError(f"its items have {len(names)} leaves, over the limit of {limits.fields}")
    paths: list[str] = []
    build = _sample_builder(said[1], paths)
    if len(paths) != len(names):
        raise ValueError(f"its data_spec has {len(paths)} leaves, and its data_format {len(names)}")
    leaves = [
        MdsColumn(path, name, None, leaf_decoder(name, path, limits, is_unpickled=path.partition("/")[0] in unpickle))
        for path, name in zip(paths, names, strict=True)
    ]
    return Tree(tuple(leaves), build)


def _sample_builder(spec: object, paths: list[str]) -> Build:
    """Build a dict of any item: sequences by number, a single leaf under the name `ALONE`."""
    said = as_object(spec) or {}
    kind, children = said.get("type"), as_list(said.get("children_spec"))
    if kind is None and children == []:
        paths.append(ALONE)
        return lambda leaves: {ALONE: next(leaves)}
    keys = list(map(str, range(len(children or ())))) if kind in _SEQUENCES else [str(key) for key in _keys(said)]
    if len(set(keys)) < len(keys):
        raise ValueError("its items have two fields of one name")
    for key in keys:
        if key.startswith("__"):
            raise ValueError(f"its items have a field {key[:80]!r}; names that begin with '__' are taken")
    parts = [_builder(child, key, paths, 1) for key, child in zip(keys, children or (), strict=True)]
    return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts, strict=True)}


def _builder(spec: object, path: str, paths: list[str], depth: int) -> Build:
    said = as_object(spec) or {}
    kind, children = said.get("type"), as_list(said.get("children_spec"))
    if children is None or depth > _TREE_DEPTH_MOST:
        raise ValueError("its data_spec is no tree")
    if kind is None:
        if children:
            raise ValueError("its data_spec has a leaf with children")
        paths.append(path)
        return next
    make = _SEQUENCES.get(as_text(kind) or "")
    keys = list(range(len(children))) if make is not None else _keys(said)
    parts = [_builder(child, f"{path}/{key}", paths, depth + 1) for key, child in zip(keys, children, strict=True)]
    if make is not None:
        return lambda leaves: make([part(leaves) for part in parts])
    return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts, strict=True)}


def _keys(said: dict[str, object]) -> list[object]:
    kind, context = as_text(said.get("type")), as_text(said.get("context"))
    if kind not in _DICTS or context is None:
        raise ValueError(f"its items hold a {str(said.get('type'))[:80]!r}, which is not read")
    keys, children = as_list(decode_json(context.encode())), as_list(said.get("children_spec"))
    is_right = keys is not None and all(type(key) in (str, int, bool, float) for key in keys)
    if keys is None or not is_right or len(keys) != len(children or ()) or len(set(keys)) < len(keys):
        raise ValueError("the keys in its data_spec are none")
    return keys
