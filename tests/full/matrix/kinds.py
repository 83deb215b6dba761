"""Every format that can be streamed: how a data set of it is written, and what cannot be done with it."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import torch
import zstandard
from builders import arrows, energon, litdata, mds, parquet, tensor_files, tfrecords, token_files, videos
from builders.numbers import saved
from builders.seekable import in_frames
from builders.tars import tar, zipped

import headrace as hr
from headrace.formats.safetensors import SafeTensors

ABILITIES = ("streamed", "by number", "global shuffle", "ranks", "resumed", "damage reported")
PLACES = ("folder", "HTTP", "S3")
PLAIN, GZ, ZST, FRAMES = PACKINGS = ("plain", "gz", "zst", "seekable zst")

Shards = Sequence[Sequence[int]]
"""The numbers of the samples of each shard."""


@dataclass(frozen=True)
class Reason:
    """Why something cannot be done.

    Attributes:
        text: for the page.
        error: a regular expression for the error.
    """

    text: str
    error: str


FROM_THE_START = Reason(
    "a shard that is compressed as a whole is unpacked from its start only; Zstandard's seekable frames can be read",
    "can only be unpacked from its start|compressed",
)


@dataclass(frozen=True)
class Kind:
    """A format.

    Attributes:
        name: Name on the page.
        write: Returns the files of a data set by name, in a packing. Those for `hr.stream` come first.
        given: Selects the addresses for `hr.stream`.
        cannot: Errors by (packing, capability).
        absent: Why there are no other packings.
        index: Argument of `hr.stream`, except for streaming.
    """

    name: str
    write: Callable[[Shards, str], dict[str, bytes]]
    number: Callable[[Mapping[str, Any]], int]
    given: Callable[[Sequence[str]], list[str]] = list
    packings: tuple[str, ...] = PACKINGS
    absent: str = ""
    cannot: Mapping[tuple[str, str], Reason] = field(default_factory=dict)
    index: str = "build"
    open: Callable[..., hr.Stream] = hr.stream


def of_bytes(name: str, pack: Callable[[Sequence[int]], bytes]) -> Callable[[Shards, str], dict[str, bytes]]:
    packers = {
        PLAIN: (bytes, ""),
        GZ: (lambda body: gzip.compress(body, mtime=0), ".gz"),
        ZST: (zstandard.ZstdCompressor().compress, ".zst"),
        FRAMES: (lambda body: in_frames(body, 100), ".zst"),
    }

    def write(shards: Shards, packing: str) -> dict[str, bytes]:
        packer, ending = packers[packing]
        return {f"{k:02}{name}{ending}": packer(pack(shard)) for k, shard in enumerate(shards)}

    return write


_WINDOW = 4


def _members(numbers: Sequence[int]) -> list[tuple[str, dict[str, bytes]]]:
    return [(f"{n:04}", {"cls": str(n).encode(), "bin": bytes(n)}) for n in numbers]


def _lines(numbers: Sequence[int]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in _rows(numbers))


def _records(numbers: Sequence[int]) -> bytes:
    return "".join(["n,text\r\n", *(f'{n},"{"ü" * 60}, ""{n}""\n"\r\n' for n in numbers)]).encode()


def _text(numbers: Sequence[int]) -> bytes:
    return "".join(f"{n} {'x' * 60}\n" for n in numbers).encode()


def _rows(numbers: Sequence[int]) -> list[dict[str, Any]]:
    return [{"n": n, "text": "ü" * n} for n in numbers]


def _mds(shards: Shards, packing: str) -> dict[str, bytes]:
    how = {PLAIN: None, GZ: "gz", ZST: "zstd"}[packing]
    return mds.folder({"n": "int", "text": "str"}, list(map(_rows, shards)), how)


def _litdata(shards: Shards, packing: str) -> dict[str, bytes]:
    return litdata.folder(list(map(_rows, shards)), {PLAIN: None, ZST: "chunk", FRAMES: "batch"}[packing])


_SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})


def _parquet(shards: Shards, packing: str) -> dict[str, bytes]:
    options = {"compression": {PLAIN: "NONE", GZ: "GZIP", ZST: "ZSTD"}[packing], "row_group_size": 3}
    files = [parquet.written(_rows(shard), _SCHEMA, **options) for shard in shards]
    return {f"{k:02}.parquet": file for k, file in enumerate(files)}


def _litdata_tables(shards: Shards, packing: str) -> dict[str, bytes]:
    files = zip(map(len, shards), _parquet(shards, packing).values(), strict=True)
    # not in the order of their names
    return litdata.of_tables({f"{chr(ord('z') - k)}.parquet": file for k, file in enumerate(files)})


def _energon(shards: Shards, packing: str) -> dict[str, bytes]:
    return energon.folder({"train": [_members(shard) for shard in shards if shard]})


def _arrow(shards: Shards, packing: str) -> dict[str, bytes]:
    codec = {PLAIN: None, ZST: "zstd"}[packing]
    files = [arrows.written(_rows(shard), _SCHEMA, rows=3, compression=codec) for shard in shards]
    return {f"{k:02}.arrow": file for k, file in enumerate(files)}


def _tfrecords(numbers: Sequence[int]) -> bytes:
    return tfrecords.file_of([{"n": np.array([n]), "text": [b"x" * 70]} for n in numbers])


def _zip(numbers: Sequence[int]) -> bytes:
    files = {f"{n:04}.{name}": body for n in numbers for name, body in (("cls", b"%d" % n), ("bin", bytes(40 * n)))}
    return zipped(files, zipfile.ZIP_DEFLATED)


def _hdf5(numbers: Sequence[int]) -> bytes:
    with h5py.File(out := io.BytesIO(), "w") as file:
        file.create_dataset("n", data=np.array(numbers, np.int64))
        zeros = np.zeros((len(numbers), 50))
        file.create_dataset("x", data=zeros, chunks=(3, 50), compression="gzip", maxshape=(None, 50))
    return out.getvalue()


def _npz(numbers: Sequence[int]) -> bytes:
    return saved(np.savez, n=np.array(numbers, np.int64), x=np.zeros((len(numbers), 50)))


def _safetensors(numbers: Sequence[int]) -> bytes:
    return tensor_files.file_of({"n": torch.tensor(numbers, dtype=torch.int64), "x": torch.zeros(len(numbers), 50)})


def _with_own_index(made: Callable[..., hr.Stream]) -> Callable[..., hr.Stream]:
    """A function that takes no `index=`, called as those that do."""
    return lambda urls, *, index, **options: made(urls, **options)


def _megatron(shards: Shards, packing: str) -> dict[str, bytes]:
    files = {}
    for k, shard in enumerate(filter(len, shards)):  # a file without tokens is an error
        tokens = np.repeat(np.array(shard, np.uint16), _WINDOW)
        files[f"{k:02}.bin"], files[f"{k:02}.idx"] = token_files.megatron([[tokens]])
    return files


def _videos(shards: Shards, packing: str, **mux: str) -> dict[str, bytes]:
    def grey(shard: Sequence[int], k: int) -> Any:
        return np.full((*videos.SIZE, 3), 20 + 10 * shard[k], np.uint8)

    filled = filter(len, shards)  # a file without frames is an error
    files = [videos.written(len(shard), pictures=partial(grey, shard), mux=mux) for shard in filled]
    return {f"{k:02}.mp4": file for k, file in enumerate(files)}


def _level(sample: Mapping[str, Any]) -> int:
    return round((float(np.mean(sample["frames"])) - 20) / 10)


def _n(sample: Mapping[str, Any]) -> int:
    return int(sample["n"])


def _folder(urls: Sequence[str]) -> list[str]:
    return [urls[0].rpartition("/")[0]]


def _alone(
    name: str, write: Callable[[Shards, str], dict[str, bytes]], number: Callable[..., int], **more: Any
) -> Kind:
    """A format whose files are not packed, and bring their own index."""
    return Kind(name, write, number, **{"packings": (PLAIN,), "index": "auto", **more})


WHOLE_ONLY = {(packing, "global shuffle"): FROM_THE_START for packing in (GZ, ZST)}
NOBODY_SEES = Reason("that a line, or its last field, was cut nobody can see but an index", "DID NOT RAISE")
_EACH = "its {} are compressed, each by itself, and not the {}"
_CLIPS = partial(hr.video, clips=hr.Clips(frames=1), decoder="pyav")
_NOT_SEEN = {**WHOLE_ONLY, (PLAIN, "damage reported"): NOBODY_SEES}


def _cls(sample: Mapping[str, Any]) -> int:
    return int(sample["cls"])


KINDS = (
    Kind("tar", of_bytes(".tar", lambda numbers: tar(_members(numbers))), _cls, cannot=WHOLE_ONLY),
    Kind("JSON lines", of_bytes(".jsonl", _lines), _n, cannot=WHOLE_ONLY),
    _alone("Parquet", _parquet, _n, packings=(PLAIN, GZ, ZST), absent=_EACH.format("pages", "file")),
    _alone(
        "Arrow",
        _arrow,
        _n,
        packings=(PLAIN, ZST),
        absent="its buffers are compressed, each by itself, by LZ4 or Zstandard, and not the file",
    ),
    Kind("CSV", of_bytes(".csv", _records), _n, cannot=_NOT_SEEN),
    Kind("text lines", of_bytes(".txt", _text), lambda sample: int(sample["text"].split()[0]), cannot=_NOT_SEEN),
    Kind("TFRecord", of_bytes(".tfrecord", _tfrecords), lambda sample: int(sample["n"][0]), cannot=WHOLE_ONLY),
    _alone("zip", of_bytes(".zip", _zip), _cls, absent=_EACH.format("members", "archive")),
    _alone(
        "tokens (Megatron's)",
        _megatron,
        lambda sample: int(sample["tokens"][0]),
        given=lambda urls: [url for url in urls if url.endswith(".bin")],
        absent="positions of windows are computed, which works for plain files only",
        index="build",
        open=_with_own_index(partial(hr.tokens, window=_WINDOW)),
    ),
    _alone("HDF5", of_bytes(".h5", _hdf5), _n, absent=_EACH.format("chunks", "file"), open=_with_own_index(hr.hdf5)),
    _alone(
        "MP4 (clips)",
        _videos,
        _level,
        absent="its frames are compressed, by one another, and not the file",
        index="build",
        open=_CLIPS,
    ),
    _alone(
        "MP4, fragmented (clips)",
        partial(_videos, movflags="frag_keyframe+empty_moov"),
        _level,
        index="build",
        open=_CLIPS,
    ),
    _alone(
        "npz (rows)", of_bytes(".npz", _npz), _n, absent=_EACH.format("arrays", "file"), open=_with_own_index(hr.arrays)
    ),
    _alone(
        "safetensors (rows)",
        of_bytes(".safetensors", _safetensors),
        _n,
        absent="no library packs it",
        open=partial(hr.stream, format=SafeTensors(rows=True)),
    ),
    _alone(
        "MDS",
        _mds,
        _n,
        given=_folder,
        packings=(PLAIN, GZ, ZST),
        absent="its writer knows no frames; a compressed shard is read whole, by number too",
    ),
    _alone("Energon", _energon, _cls, given=_folder, absent="its indexes hold for plain archives alone"),
    _alone(
        "LitData", _litdata, _n, given=_folder, packings=(PLAIN, ZST, FRAMES), absent="its writer knows Zstandard alone"
    ),
    _alone(
        "LitData (Parquet)",
        _litdata_tables,
        _n,
        given=_folder,
        packings=(PLAIN, GZ, ZST),
        absent=_EACH.format("pages", "file"),
    ),
)
