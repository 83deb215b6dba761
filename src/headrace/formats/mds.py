"""The MDS format, the shards of MosaicML's streaming: a catalogue, and offsets in each shard.

Layout of a shard: u32 number of samples, n; u32 n + 1 offsets: sample i is [offsets[i], offsets[i + 1]); JSON of the
shard's settings, up to offsets[0]. The samples of a compressed shard share one block. Pickles are never loaded.

Damage raises a ValueError, which becomes a FormatError with the shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from headrace._util.lazy import if_installed
from headrace._util.reads import Reads
from headrace.errors import LimitError, reason_of
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
from headrace.formats.pinned_object import PinnedObject
from headrace.types import Buffer, Ints

_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
# codes of dtypes in arrays
_DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ("uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"),
        strict=True,
    )
)
_DIMENSIONS_MOST = 64
_DIGITS_MOST = 4300
_COUNT = struct.Struct("<I")
_PIL = struct.Struct("<III")
_IMAGE_LISTS = ("list[jpeg]", "list[png]", "list[pil]")
_MODE_MOST = 16
_COLUMNS_MOST = 1000


class MdsColumn(NamedTuple):
    """A column of a sample, or a leaf of LitData's items. `size` is in bytes. None: variable."""

    name: str
    encoding: str
    size: int | None
    decode: Callable[[bytes], object]


@lru_cache(maxsize=64)
def columns_of(text: str, limits: Limits = DEFAULTS) -> tuple[MdsColumn, ...]:
    """Parse columns from a JSON of [[name, encoding, size], …], as written by `described`."""
    return tuple(_column(name, encoding, size, limits) for name, encoding, size in json.loads(text))


def described(names: object, encodings: object, sizes: object) -> str:
    """Return the columns of a shard as JSON for `columns_of`. Raises a ValueError if invalid."""
    lists = [one for one in map(as_list, (names, encodings, sizes)) if one is not None]
    if len(lists) < 3 or len({len(one) for one in lists}) > 1 or len(lists[0]) > _COLUMNS_MOST:
        raise ValueError("its columns' names, encodings and sizes are not lists of one length")
    texts = as_texts(names)
    if texts is None or len(set(texts)) < len(texts):
        raise ValueError("its columns' names are none")
    text = json.dumps(list(zip(*lists, strict=True)), separators=(",", ":"))
    columns_of(text)
    return text


def _column(name: str, encoding: object, size: object, limits: Limits) -> MdsColumn:
    if name.startswith("__"):
        raise ValueError(f"column {name!r} begins with '__'; such names are taken")
    nbytes = as_count(size, limits.member_bytes)
    if size is not None and nbytes is None:
        raise ValueError(f"column {name!r} has values of {str(size)[:40]} bytes")
    kind = as_text(encoding)
    decode = None if kind is None else _decoder(kind, limits)
    if encoding == "pkl":
        raise ValueError(f"column {name!r} is pickled: reading it would run code from the data, and that is not done")
    if kind is None or decode is None:
        raise ValueError(f"column {name!r} has the encoding {str(encoding)[:80]!r}, which is not known")
    return MdsColumn(name, kind, nbytes or None, decode)  # a size of 0 means variable


def values_of(columns: tuple[MdsColumn, ...], data: bytes, unit: str = "column") -> list[object]:
    """Decode a sample: the sizes of columns without a fixed one, and the columns. A ValueError names a damaged one."""
    at = 4 * sum(column.size is None for column in columns)
    if len(data) < at:
        raise ValueError(f"it has {len(data)} bytes, and the sizes in it take {at}")
    said = iter(struct.unpack_from(f"<{at // 4}I", data))
    sizes = [next(said) if column.size is None else column.size for column in columns]
    if at + sum(sizes) != len(data):
        raise ValueError(f"its values have {sum(sizes)} bytes, and {len(data) - at} follow their sizes")
    values = []
    for column, size in zip(columns, sizes, strict=True):
        try:
            values.append(column.decode(data[at : at + size]))
        except Exception as error:
            what = f"{unit} {column.name!r} does not decode as {column.encoding[:80]}"
            raise ValueError(f"{what}: {reason_of(error)}") from error
        at += size
    return values


def sample_of(columns: tuple[MdsColumn, ...], data: bytes) -> dict[str, object]:
    return dict(zip([column.name for column in columns], values_of(columns, data), strict=True))


def _decoder(encoding: str, limits: Limits) -> Callable[[bytes], object] | None:
    name, _, more = encoding.partition(":")
    if name in ("bytes", "jpeg", "png"):
        return bytes  # images are decoded by `.decode()`
    if encoding in _SCALARS:
        return partial(_scalar, _SCALARS[encoding])
    if name == "ndarray":
        return _array_decoder(more)
    if encoding in _IMAGE_LISTS:
        return partial(_list, partial(raw_image, limits) if "pil" in encoding else bytes)
    plain: dict[str, Callable[[bytes], object]] = {
        "str": decode_text,
        "int": lambda data: int(_scalar(_SCALARS["int64"], data)),
        "str_int": lambda data: int(_short(data)),
        "str_float": lambda data: float(_short(data)),
        "str_decimal": lambda data: Decimal(_short(data)),
        "json": decode_json,
        "pil": partial(raw_image, limits),
        "jpeg_array": image_array,
        "jpegarray": image_array,
    }
    return plain.get(encoding)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"it has {len(data)} bytes")
    return np.frombuffer(data, dtype)[0]


def _short(data: bytes) -> str:
    if len(data) > _DIGITS_MOST:
        raise ValueError(f"it has {len(data)} digits, over the limit of {_DIGITS_MOST}")
    return str(data, "ascii")


def _array_decoder(more: str) -> Callable[[bytes], object] | None:
    """Return the decoder of `ndarray:dtype:shape`, both optional. None if invalid."""
    dtype, _, said = more.partition(":")
    if dtype and dtype not in _SCALARS:
        return None
    sizes = said.split(",") if said else []
    if not all(size.isascii() and size.isdigit() and 0 < int(size[:18]) < 2**53 for size in sizes):
        return None
    return partial(_array, _SCALARS[dtype] if dtype else None, tuple(map(int, sizes)) if sizes else None)


def _array(dtype: np.dtype[np.generic] | None, shape: tuple[int, ...] | None, data: bytes) -> object:
    at = 0
    if dtype is None:
        if not data or data[0] not in _DTYPES:
            raise ValueError(f"its dtype is {data[:1]!r}")
        dtype, at = _SCALARS[_DTYPES[data[0]]], 1
    if shape is None:
        count, width = (data[at] >> 2, 1 << (data[at] & 3)) if at < len(data) else (_DIMENSIONS_MOST, 1)
        end = at + 1 + count * width
        if count >= _DIMENSIONS_MOST or end > len(data):
            raise ValueError("its shape is cut off")
        shape = tuple(np.frombuffer(data, f"<u{width}", count, at + 1).tolist())
        at = end
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != len(data) - at:
        raise ValueError(f"its shape {list(shape)} takes {nbytes} bytes, and {len(data) - at} follow")
    return np.frombuffer(data, dtype, offset=at).reshape(shape).copy()


def raw_image(limits: Limits, data: bytes) -> object:
    from PIL import Image

    if len(data) < _PIL.size:
        raise ValueError("it is cut off")
    width, height, length = _PIL.unpack_from(data)
    if width * height > limits.pixels or length > _MODE_MOST:
        raise ValueError(f"it claims {width} x {height} pixels and a mode of {length} letters, over the limit")
    end = _PIL.size + length
    return Image.frombytes(str(data[_PIL.size : end], "ascii"), (width, height), data[end:])


def _list(decode: Callable[[bytes], object], data: bytes) -> list[object]:
    """Decode a list: an unused word, the number of values, their sizes, and the values."""
    return [decode(one) for one in image_array(data[4:])] if len(data) >= 8 else _cut_off()


def image_array(data: bytes) -> list[bytes]:
    (count,) = _COUNT.unpack_from(data) if len(data) >= 4 else _cut_off()
    if 4 + 4 * count > len(data):
        raise ValueError(f"it claims {count} values, and has {len(data)} bytes")
    sizes = struct.unpack_from(f"<{count}I", data, 4)
    at = 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise ValueError(f"its values have {sum(sizes)} bytes, and {len(data) - at} follow")
    values = []
    for size in sizes:
        values.append(data[at : at + size])
        at += size
    return values


def _cut_off() -> NoReturn:
    raise ValueError("it is cut off")


def count_of(head: Buffer) -> int:
    if len(head) < _COUNT.size:
        raise ValueError("it is cut off in its table")
    (count,) = _COUNT.unpack_from(head)
    return int(count)


def table_bytes(count: int, limits: Limits) -> int:
    """Return the bytes of the number and the offsets. Raises a LimitError beyond the limit."""
    nbytes = 4 * (count + 2)
    check_bytes(f"the table of {count} samples", nbytes, limits.member_bytes)
    return nbytes


def offsets_of(head: Buffer, count: int, size: int, limits: Limits) -> Ints:
    """Return the starts of the samples and the end of the last, in a shard of `size` bytes."""
    said, end = count_of(head), table_bytes(count, limits)
    if said != count:
        raise ValueError(f"it has {said} samples, and {count} were announced")
    if len(head) < end:
        raise ValueError("it is cut off in its table")
    offsets = np.frombuffer(head, "<u4", count + 1, 4).astype(np.int64)
    if int(offsets[0]) < end or int(offsets[-1]) != size:
        raise ValueError(f"its samples are from byte {offsets[0]} to {offsets[-1]} of {size}")
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"sample {int(lengths.argmin())} ends before it begins")
    for k in np.flatnonzero(lengths > limits.member_bytes)[:1].tolist():
        check_bytes(f"sample {k}", int(lengths[k]), limits.member_bytes)
    return offsets


def columns_said(settings: Buffer) -> str:
    """Return the columns in a shard's settings, in the form of `described`."""
    try:
        said = json.loads(bytes(settings))
        lists = [said[f"column_{what}"] for what in ("names", "encodings", "sizes")]
        is_mds = said.get("format") == "mds"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError("it does not list its columns") from None
    if not is_mds:
        raise ValueError(f"its format is called {str(said.get('format'))[:40]!r}")
    return described(*lists)


_FIRST_BYTES = 64 * 1024
_AT_FIRST = 4 * 2**20
_CATALOGUE = "index.json"


class Mds(Format):
    """MDS: a folder with an `index.json`, or single uncompressed shards."""

    name = "mds"
    suffixes = (".mds",)
    catalogue = _CATALOGUE

    def sniff(self, name: str, head: bytes) -> float:
        begins_so = name == _CATALOGUE and head.lstrip()[:1] == b"{" and b'"shards"' in head
        return 0.9 if begins_so and b'"mds"' in head else 0.0

    def catalogued(self, url: str, data: bytes, limits: Limits, others: Callable[[str], bytes | None]) -> Catalogue:
        said = catalogue_object(url, data)
        shards = as_list(said.get("shards"))
        if said.get("version") != _VERSION or shards is None:
            raise catalogue_damage(url, f"it is of version {str(said.get('version'))[:20]!r}, and {_VERSION} is read")
        texts: dict[str, str] = {}  # most shards have equal columns: share one string
        entries = []
        for number, one in enumerate(shards):
            with catalogue_entry(url, f"shard {number}"):
                name, shard = _shard(one, texts, limits)
            entries.append(ShardEntry(beside(url, name), shard.samples, shard, shard.packed is not None))
        for kind in {entry.about.kind for entry in entries} - {""}:
            Decompressor(kind, url, limits)  # raises early if the library is not installed
        return Catalogue(entries)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        said: Shard | None = shard.about
        with errors_named(shard.url):
            if said is not None and said.packed is not None:
                return await _index_of_packed(reads, shard.url, said, said.packed, limits)
            return await _index(reads, shard.url, said, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        (how,), (data,) = block.members, bodies
        if how.startswith("["):
            return [sample_of(columns_of(how, block.limits), data)]
        said: dict[str, Any] = json.loads(how)
        (raw_hashes, packed_hashes), columns = said["hashes"], columns_of(said["columns"], block.limits)
        _check(data, packed_hashes, "its compressed bytes")
        raw = unpacked(said["kind"], data, block.url, block.limits, said["bytes"])
        _check(raw, raw_hashes, "the bytes that it unpacks to")
        return CutRows(raw, offsets_of(raw, said["samples"], len(raw), block.limits), partial(sample_of, columns))


MDS = Mds()


async def _index(reads: Reads, url: str, said: Shard | None, limits: Limits) -> ShardIndex:
    shard = PinnedObject(reads, url)
    # limit the first read until the size of the object is known
    head = await shard.head(_FIRST_BYTES if said is None else min(table_bytes(said.samples, limits), _AT_FIRST))
    if said is not None and said.raw.nbytes != shard.size:
        raise ValueError(f"it has {shard.size} bytes, and its catalogue lists {said.raw.nbytes}")
    count = count_of(head) if said is None else said.samples
    end = min(table_bytes(count, limits), shard.size)
    offsets = offsets_of(await shard.head(end), count, shard.size, limits)
    if said is not None:
        columns = said.columns
    else:
        start = int(offsets[0])
        check_bytes("the head of its settings", start - end, limits.header_bytes)
        columns = columns_said((await shard.head(start))[end:start])
    rows = rows_of_members(keys_of(np.arange(count)), offsets[:-1], np.diff(offsets), columns)
    return ShardIndex(rows, None, shard.size, shard.etag)


async def _index_of_packed(reads: Reads, url: str, said: Shard, packed: File, limits: Limits) -> ShardIndex:
    if max(said.raw.nbytes, packed.nbytes) > limits.member_bytes:
        raise LimitError(f"it has {said.raw.nbytes} bytes unpacked, over the limit of {limits.member_bytes}")
    shard = PinnedObject(reads, url)
    await shard.read(0, 1)
    if shard.size != packed.nbytes:
        raise ValueError(f"it has {shard.size} bytes, and its catalogue lists {packed.nbytes}")
    how = {"columns": said.columns, "samples": said.samples, "bytes": said.raw.nbytes, "kind": said.kind}
    member = json.dumps({**how, "hashes": [said.raw.hashes, packed.hashes]}, separators=(",", ":"))
    rows = rows_of_one_block(said.samples, 0, packed.nbytes, member)
    return ShardIndex(rows, None, shard.size, shard.etag)


def _check(data: bytes | bytearray, hashes: dict[str, str], what: str) -> None:
    for name, digits in hashes.items():
        known = hashlib.new(name) if name in hashlib.algorithms_available and "shake" not in name else _xxhash(name)
        if known is not None:
            known.update(data)
            if known.hexdigest() != digits.lower():
                raise ValueError(f"{what} have the {name} {known.hexdigest()}, and its catalogue has {digits[:128]}")


def _xxhash(name: str) -> Any:
    library = if_installed("xxhash")
    return getattr(library, name)() if library is not None and name in library.algorithms_available else None


_VERSION = 2
_SAMPLES_MOST = 2**32 - 1
_BYTES_MOST = 2**53
_KINDS = {"zstd": "zstd", "gz": "gzip", "bz2": "bzip2"}


@dataclass(frozen=True, slots=True)
class File:
    nbytes: int
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard in the catalogue. `packed` is the stored compressed file. None: not compressed."""

    columns: str
    samples: int
    raw: File
    packed: File | None = None
    kind: str = ""


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
    limits.check_unpacked(packed.nbytes, raw.nbytes)
    return name, Shard(columns, samples, raw, packed, _KINDS[algorithm])


def _file(one: object) -> tuple[str, File]:
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
    return name, File(nbytes, dict(zip(hashes, digits, strict=True)))
