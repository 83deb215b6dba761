"""`headrace pack`: writes samples of any source as shards."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import shutil
import tarfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace._util import check
from headrace.cli.settings import add_command, add_storage_to, count, say, storage_options
from headrace.errors import OptionError, masked, printable

if TYPE_CHECKING:
    from headrace.delivery.iterator import BatchIterator


_DESCRIPTION = """\
Write the samples of a place, of any format, in their order as shards: WebDataset's tar, each with its index beside it,
or Parquet. Shards are written as a whole or not at all.
"""
_EPILOG = """\
The same command continues an interrupted run: finished shards are kept, and their samples are not read again.
"""
_ROWS_BYTES = 32 * 2**20


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        "pack",
        run,
        summary="write the samples of any place as shards",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        advice="; finished shards are kept, and the same command continues after them",
    )
    parser.add_argument(
        "url", metavar="PLACE", help="an address, a folder, or a pattern like 's3://bucket/**/*.parquet'"
    )
    parser.add_argument("output", metavar="OUT", help="the folder that shards go to: a path, or an address")
    parser.add_argument(
        "--format", choices=("tar", "parquet"), default="tar", help="what is written (default: %(default)s)"
    )
    parser.add_argument(
        "--from", dest="source", metavar="NAME", help="what is read; by default it follows from the place"
    )
    parser.add_argument(
        "--samples-per-shard", type=count, default=10_000, metavar="N", help="at most (default: %(default)s)"
    )
    parser.add_argument(
        "--shard-bytes",
        type=count,
        default=256 * 2**20,
        metavar="N",
        help="a shard ends when it has as many (default: %(default)s)",
    )
    add_storage_to(parser)
    parser.add_argument("--quiet", action="store_true", help="print errors only")


class _TarShard:
    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "x", format=tarfile.PAX_FORMAT)  # noqa: SIM115 (closed by close)
        self._taken: set[str] = set()
        self.nbytes = 0

    def add(self, sample: Mapping[str, Any], number: int) -> None:

        key = key_of(sample, number, self._taken)
        for name, body in members_of(sample, number).items():
            member = tarfile.TarInfo(f"{key}.{name}")
            member.size = len(body)
            self._tar.addfile(member, io.BytesIO(body))
            self.nbytes += 512 + len(body) + -len(body) % 512

    def close(self) -> None:
        self._tar.close()

    drop = close


class _ParquetShard:
    def __init__(self, path: Path, journal: _PackJournal) -> None:
        self._path, self._journal = path, journal
        self._rows: list[dict[str, Any]] = []
        self._waiting = self.nbytes = 0
        self._file: Any = None

    def add(self, sample: Mapping[str, Any], number: int) -> None:
        row = {name: value for name, value in sample.items() if not name.startswith("__")}
        if "key" not in row:
            row = {"key": str(sample.get("__key__", "")), **row}
        self._rows.append(row)
        nbytes = sum(_size(value) for value in row.values())
        self._waiting += nbytes
        self.nbytes += nbytes
        if self._waiting >= _ROWS_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = self._journal.schema
        if schema is None:
            table = pa.Table.from_pylist(self._rows)
            schema = self._journal.schema = table.schema
        else:
            if others := {name for row in self._rows for name in row} - set(schema.names):
                raise OptionError(f"a sample has the field {min(others)!r}, and those of the first rows have not")
            table = pa.Table.from_pylist(self._rows, schema=schema)
        for name in schema.names:
            if pa.types.is_floating(schema.field(name).type) and schema.field(name).type.bit_width < 64:
                self._check_exact(name, table.column(name).to_pylist())
        if self._file is None:
            self._file = pq.ParquetWriter(self._path, schema, write_page_checksum=True)
        self._file.write_table(table)
        self._rows, self._waiting = [], 0

    def _check_exact(self, name: str, written: list[float | None]) -> None:
        """Check that numbers are not rounded, as the first rows determine a column's type.

        Raises:
            OptionError: a number would be rounded.
        """
        for row, value in zip(self._rows, written, strict=True):
            if value is not None and not math.isnan(value) and float(row[name]) != value:
                reason = f"the field {name!r} has {row[name]!r}, which its column would round to {value!r}"
                raise OptionError(f"{reason}, as the first rows do: give all samples numbers of one type, by .map()")


class _PackJournal:
    """Progress of a run: finished shards and samples, and the loader state after them.

    Args:
        about: Digest of the options. A journal with another digest is refused.

    Attributes:
        parts: Folder of unfinished shards.
        schema: Schema of Parquet files, after the first rows.
    """

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._about, self._is_new = path, about, not path.exists()
        self.parts, self.is_done = path.with_name(f"{path.name}.parts"), False
        self.shards = self.samples = 0
        self.state: Any = None
        self.schema: Any = None
        if self._is_new:
            return
        try:
            found = json.loads(path.read_text())
            if found["about"] != about:
                raise OptionError.at(str(path), "is of another run, with other options: give another OUT, or remove it")
            self.shards, self.samples, self.state = int(found["shards"]), int(found["samples"]), found["state"]
            self.is_done = bool(found["done"])
            if found["schema"] is not None:
                import pyarrow as pa

                self.schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found["schema"])))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise OptionError.at(str(path), "is damaged; remove it, and all is written again") from error

    def begin(self, output: str, kind: str, options: Mapping[str, object]) -> None:
        from headrace.dataset.source import blocking
        from headrace.sources.reading import found

        shutil.rmtree(self.parts, ignore_errors=True)  # left by a killed run
        first = f"{output}/{0:06d}.{kind}"
        if self._is_new:
            if blocking(partial(found, first, 1, options)) is not None:
                raise OptionError.at(
                    first, "is there already, and not of a run that can be continued: give another OUT"
                )
            self._write(None)

    def add(self, samples: int, state: object, *, is_last: bool) -> None:
        self.shards, self.samples, self.is_done = self.shards + 1, self.samples + samples, is_last
        self._write(state)

    def _write(self, state: object) -> None:
        schema = None if self.schema is None else self.schema.serialize().to_pybytes().hex()
        found = {"about": self._about, "shards": self.shards, "samples": self.samples, "state": state, "schema": schema}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps({**found, "done": self.is_done}))
        part.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)


def run(given: argparse.Namespace) -> int:
    from headrace.fetch.stores.addresses import split
    from headrace.fetch.stores.writing import check_writable
    from headrace.indexes.cache_path import names_path
    from headrace.loader import single_samples
    from headrace.sources.constructors import stream

    if given.format == "parquet":
        _check_pyarrow()
    options = storage_options(given.storage_option)
    output = given.output.rstrip("/")
    check_writable(f"{output}/x")
    asked = [given.url, output, given.format, given.samples_per_shard, given.shard_bytes, given.source]
    about = blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
    is_here = split(output)[0] == "file"
    place = Path(split(output)[2]) / ".headrace-pack.json" if is_here else names_path(output).with_suffix(".pack.json")
    journal = _PackJournal(place, about)
    data = stream(given.url, format=given.source, storage_options=options)
    loader = single_samples(data)
    journal.begin(output, given.format, options)
    if journal.state is not None:
        loader.load_state_dict(journal.state)
    began, first = time.monotonic(), journal.samples
    try:
        if not journal.is_done:
            _write(given, cast("BatchIterator[object]", iter(loader)), journal, output, options)
    finally:
        loader.close()
        shutil.rmtree(journal.parts, ignore_errors=True)
    if not given.quiet:
        kept = f" ({first:,} of them from before)" if first else ""
        print(
            f"{journal.shards:,} shards with {journal.samples:,} samples{kept} in {printable(masked(output))}, "
            f"{time.monotonic() - began:.1f} s"
        )
    journal.remove()
    return 0


def _write(
    given: argparse.Namespace,
    samples: BatchIterator[object],
    journal: _PackJournal,
    output: str,
    options: Mapping[str, object],
) -> None:
    waiting = next(samples, None)
    journal.parts.mkdir(parents=True, exist_ok=True)
    while waiting is not None:
        part = journal.parts / f"{journal.shards:06d}.{given.format}"
        writer = _TarShard(part) if given.format == "tar" else _ParquetShard(part, journal)
        with ExitStack() as closing:
            closing.callback(writer.drop)
            written, waiting, state = _fill(given, writer, waiting, samples, journal)
        url = f"{output}/{part.name}"
        asyncio.run(_publish(url, part, options, has_index=given.format == "tar"))
        part.unlink()
        journal.add(written, state, is_last=waiting is None)
        if not given.quiet:
            say("pack", f"{masked(url)}: {written:,} samples, {writer.nbytes:,} bytes")


def _fill(
    given: argparse.Namespace,
    writer: _TarShard | _ParquetShard,
    waiting: object,
    samples: BatchIterator[object],
    journal: _PackJournal,
) -> tuple[int, object, object]:
    """Write one shard. Return its number of samples, the next sample, and the state between."""
    written = 0
    while True:
        if not isinstance(waiting, Mapping):
            raise OptionError(f"samples are of type {type(waiting).__name__}: dicts of fields can be packed")
        writer.add(waiting, journal.samples + written)
        written += 1
        is_full = written >= given.samples_per_shard or writer.nbytes >= given.shard_bytes
        if is_full:
            break
        waiting = next(samples, None)
        if waiting is None:
            break
    state = samples.state_dict()  # after this shard's last sample, before the next one is read
    waiting = next(samples, None) if is_full else None
    writer.close()
    return written, waiting, state


async def _publish(url: str, part: Path, options: Mapping[str, object], *, has_index: bool) -> None:
    from headrace.fetch import Reader
    from headrace.fetch.stores.writing import write_object
    from headrace.indexes.building import build_index

    await write_object(url, part, options)
    if not has_index:
        return
    async with Reader(concurrency=4, storage_options=options) as reader:
        progress = await build_index(reader, [url], None, storage_options=options)
    for failure in progress.failures.values():
        raise failure


def _size(value: Any) -> int:
    return len(value) if isinstance(value, bytes | str) else getattr(value, "nbytes", 0) or 16


def _check_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise check.lacking("--format parquet", "pyarrow: pip install headrace[parquet]") from error


IMAGES = {  # the extension of an image by its first bytes
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"BM": "bmp",
}


def key_of(sample: Mapping[str, Any], number: int, taken: set[str]) -> str:
    """Return the sample's key, if it is valid and unique in its shard; else its number."""
    given = sample.get("__key__")
    key = given if isinstance(given, str) else ""
    name = key.rpartition("/")[2]
    is_plain = name and "." not in name and key.isprintable() and not key.startswith("/") and "//" not in key
    if not is_plain or key in taken or any(part in (".", "..") for part in key.split("/")):
        key = f"{number:012d}"
        if key in taken:
            raise OptionError(f"sample {number} has no key, and its number is the key of another")
    taken.add(key)
    return key


def members_of(sample: Mapping[str, Any], number: int) -> dict[str, bytes]:
    """Return the bytes of a sample's fields, by extensions that identify their type.

    Bytes keep the field's name. Texts become .txt, arrays .npy, all else .json. If the name already has that extension,
    none is added. The field "image" gets the extension of its image format, which other readers need.

    Raises:
        OptionError: a field cannot be stored, or there is none.
    """
    members: dict[str, bytes] = {}
    for field, value in sample.items():
        if field.startswith("__"):
            continue
        extension, body = _told(field, value, number)
        name = (f"{field}.{extension}" if extension else field).lower()
        if name == "image":
            name = next((kind for start, kind in IMAGES.items() if body.startswith(start)), name)
        if not field or "/" in field or not field.isprintable() or name in members:
            raise OptionError(f"sample {number}: the field {field!r} cannot be a member's extension, or two are alike")
        members[name] = body
    if not members:
        raise OptionError(f"sample {number} has no fields: nothing of it would be written")
    return members


def _told(field: str, value: Any, number: int) -> tuple[str, bytes]:
    """Return (extension to add, bytes)."""
    import numpy as np  # other commands do without

    from headrace.formats.decoders import WHAT_BY_EXTENSION

    what = WHAT_BY_EXTENSION.get(field.rpartition(".")[2])
    if isinstance(value, bytes | bytearray | memoryview):
        return "", bytes(value)
    if isinstance(value, str):
        return "" if what == "text" else "txt", value.encode("utf-8", "surrogatepass")
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        out = io.BytesIO()
        np.save(out, value, allow_pickle=False)
        return "" if what == "npy" else "npy", out.getvalue()
    if type(value) is int and what == "int":
        return "", str(value).encode()
    try:
        value = value.item() if isinstance(value, np.generic) else value
        return "" if what == "json" else "json", json.dumps(value, allow_nan=True, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        what = f"sample {number}: field {field!r} is a {type(value).__name__}"
        raise OptionError(f"{what}, which has no bytes: {error}") from error
