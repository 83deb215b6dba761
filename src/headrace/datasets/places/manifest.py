"""Lists of names on disk: tens of millions of them in flat arrays, mapped, and none of them a Python object.

A file has one part after the other, each at a multiple of eight bytes: the names, where each ends, and, if the listing
told them, the objects' sizes, their ETags, and where each of those ends; then a footer of JSON, and its length.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from headrace.datasets.packed import Packed
from headrace.datasets.places.entries import UNKNOWN, Entries
from headrace.datasets.places.kinds import Survey
from headrace.datasets.places.survey import kept_from, kept_survey, surveyed
from headrace.errors import FormatError
from headrace.formats.json_values import as_number, as_text
from headrace.types import Ints, Listed

_MAGIC = b"hrnames2"
_ALIGNED = 8
_COPY_BYTES = 2**20
_FOOTER_BYTES = 2**24


class Manifest(Entries):
    """Names in a file that `ManifestWriter` wrote; they travel by the file's path, and are mapped.

    Args:
        path: the file.
        digest: of the names that are meant; None: of those that are there.

    Raises:
        FormatError: it is damaged, or has other names.
        OSError: it cannot be read.

    Attributes:
        digest: tells these names from others.
        about: what the writer was told besides.
    """

    def __init__(self, path: str | Path, digest: str | None = None) -> None:
        self.path = Path(path)
        names, sizes, etags, self.digest, self.about = _read(self.path)
        super().__init__(names, sizes, etags, as_number(self.about.get("start")) or 0)
        self.revision = as_text(self.about.get("revision")) or ""
        if digest not in (None, self.digest):
            raise FormatError(f"the list of names in {self.path} is another one now", url=str(self.path))

    def __reduce__(self) -> tuple[object, ...]:
        return Manifest, (self.path, self.digest)

    @cached_property
    def survey(self) -> Survey:
        """What the names have: as it was kept with them, or found now."""
        return kept_survey(self.about.get("survey")) or super().survey


class ManifestWriter:
    """Writes names, in the order in which they come, without holding them.

    Args:
        path: where they go; a file that is there is replaced, when all is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        self._names, self._etags = _Texts(self._opened("part")), _Texts(self._opened("etags"))
        self._name_ends, self._etag_ends = self._opened("ends"), self._opened("etag-ends")
        self._sizes = self._opened("sizes")
        self._names.file.write(_MAGIC)
        self._has_sizes = False
        self._digest = NamesDigest()
        self.count = 0

    def _opened(self, what: str) -> BinaryIO:
        unique = f".{self._path.name}.{os.getpid()}.{id(self):x}"
        file = self._path.with_name(f"{unique}.{what}").open("x+b", buffering=_COPY_BYTES)
        self._stack.callback(Path(file.name).unlink, missing_ok=True)
        self._stack.callback(file.close)
        return file

    def add(self, objects: Sequence[Listed]) -> None:
        """More names, with what is known of their objects."""
        names = [one.path for one in objects]
        self._name_ends.write(self._names.add(names))
        self._etag_ends.write(self._etags.add([one.etag or "" for one in objects]))
        sizes = np.array([UNKNOWN if one.size is None else one.size for one in objects], "<i8")
        self._sizes.write(sizes.tobytes())
        self._has_sizes = self._has_sizes or bool((sizes != UNKNOWN).any())
        self.count += len(names)
        self._digest.update(names)

    def finish(self, about: Mapping[str, object], start: int | None = None) -> Manifest:
        """Write the file; gives what it has.

        Args:
            start: where paths begin in the names, in bytes: what the names have is kept, too. None: it is not.
        """
        data = self._names.file
        columns: list[tuple[bytes, BinaryIO]] = [(bytes(8), self._name_ends)]
        if self._has_sizes:
            columns.append((b"", self._sizes))
        if self._etags.nbytes:
            columns += [(b"", self._etags.file), (bytes(8), self._etag_ends)]
        for first, file in columns:
            data.write(b"\0" * (-data.tell() % _ALIGNED) + first)
            file.seek(0)
            shutil.copyfileobj(file, data, _COPY_BYTES)
        data.write(b"\0" * (-data.tell() % _ALIGNED))
        fields = {
            **about,
            **({} if start is None else {"start": start, "survey": self._surveyed(start)}),
            "count": self.count,
            "bytes": self._names.nbytes,
            "sizes": int(self._has_sizes),
            "etags": self._etags.nbytes,
            "digest": self._digest.text(self.count),
        }
        footer = json.dumps(fields).encode()
        data.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)
        data.close()
        Path(data.name).replace(self._path)
        return Manifest(self._path)

    def _surveyed(self, start: int) -> dict[str, object] | None:
        self._names.file.flush()
        begin = -(-(len(_MAGIC) + self._names.nbytes) // _ALIGNED) * _ALIGNED
        names = _mapped(self._names.file.name, np.uint8, len(_MAGIC), self._names.nbytes)
        ends = _mapped(self._names.file.name, np.int64, begin, self.count + 1)
        return kept_from(surveyed(Packed("str", names, ends), start))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class _Texts:
    """Texts, one behind the other in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.nbytes = file, 0

    def add(self, texts: Sequence[str]) -> bytes:
        """More of them; gives where each ends, as numbers of eight bytes."""
        pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
        self.file.write(b"".join(pieces))
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces))) + self.nbytes
        if len(ends):
            self.nbytes = int(ends[-1])
        return ends.astype("<i8").tobytes()


class NamesDigest:
    """What tells some names, in their order, from others; it is `fingerprint_of` a source that has them."""

    def __init__(self) -> None:
        self._digest, self._is_first = blake2b(digest_size=8), True

    def update(self, names: Iterable[str]) -> None:
        """More names."""
        named = [name.partition("?")[0].rpartition("/")[2] for name in names]
        if named:
            text = "\n".join(named if self._is_first else ["", *named])
            self._digest.update(text.encode("utf-8", "surrogateescape"))
            self._is_first = False

    def text(self, count: int) -> str:
        """For a source of `count` samples, one a name."""
        digest = self._digest.copy()
        digest.update(array("q", [count]).tobytes())
        return digest.hexdigest()


def _read(path: Path) -> tuple[Packed[str], Ints | None, Packed[str] | None, str, dict[str, Any]]:
    """(the names, the sizes, the ETags, the digest, the rest of the footer)."""
    about, end = _footer(path)
    count, nbytes, etag_bytes = (as_number(about.get(name)) for name in ("count", "bytes", "etags"))
    digest, has_sizes = as_text(about.get("digest")), about.get("sizes")
    if count is None or nbytes is None or etag_bytes is None or digest is None:
        raise _damage(path)
    at = [len(_MAGIC)]

    def column(kind: type[np.generic], length: int) -> Any:
        begin, nbytes = at[0], length * np.dtype(kind).itemsize
        at[0] = -(-(begin + nbytes) // _ALIGNED) * _ALIGNED
        if at[0] > end:
            raise _damage(path)
        return _mapped(path, kind, begin, length)

    def texts(nbytes: int) -> Packed[str]:
        data, offsets = column(np.uint8, nbytes), column(np.int64, count + 1)
        if int(offsets[0]) or int(offsets[-1]) != nbytes:
            raise _damage(path)
        return Packed("str", data, offsets)

    names = texts(nbytes)
    sizes = column(np.int64, count) if has_sizes else None
    etags = texts(etag_bytes) if etag_bytes else None
    if at[0] != end:
        raise _damage(path)
    return names, sizes, etags, digest, about


def _mapped(path: str | Path, kind: type[np.generic], begin: int, count: int) -> Any:
    return np.memmap(path, kind, "r", begin, (count,)) if count else np.zeros(0, kind)


def _footer(path: Path) -> tuple[dict[str, Any], int]:
    """What a file's footer says, and where that begins."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 16))
        tail = file.read()
        length = int.from_bytes(tail[:8], "little")
        if size < 40 or tail[8:] != _MAGIC or length > min(size - 32, _FOOTER_BYTES):
            raise _damage(path)
        file.seek(size - 16 - length)
        try:
            about = json.loads(file.read(length))
        except ValueError as error:
            raise _damage(path) from error
    if not isinstance(about, dict):
        raise _damage(path)
    return about, size - 16 - length


def _damage(path: Path) -> FormatError:
    return FormatError(f"{path} is no list of names of headrace's, or damaged; remove it", url=str(path))
