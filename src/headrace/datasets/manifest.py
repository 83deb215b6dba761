"""Lists of names on disk: tens of millions of them in two flat arrays, mapped, and none of them a Python object."""

from __future__ import annotations

import io
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import numpy as np

from headrace.datasets.packed import Packed
from headrace.errors import FormatError
from headrace.formats.json_values import as_number, as_text

_MAGIC = b"hrnames1"
_ALIGNED = 8
_COPY_BYTES = 2**20


class Manifest(Sequence[str]):
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
        self._names, self.digest, self.about = _read(self.path)
        if digest not in (None, self.digest):
            raise FormatError(f"the list of names in {self.path} is another one now", url=str(self.path))

    def __reduce__(self) -> tuple[object, ...]:
        return Manifest, (self.path, self.digest)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Packed[str]: ...
    def __getitem__(self, index: int | slice) -> str | Packed[str]:
        return self._names[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


class ManifestWriter:
    """Writes names, in the order in which they come, without holding them.

    Args:
        path: where they go; a file that is there is replaced, when all is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        unique = f".{path.name}.{os.getpid()}.{id(self):x}"
        self._data = path.with_name(f"{unique}.part").open("xb", buffering=_COPY_BYTES)
        self._ends = path.with_name(f"{unique}.ends").open("x+b", buffering=_COPY_BYTES)
        self._data.write(_MAGIC)
        self.count = self._size = 0
        self._digest = NamesDigest()

    def add(self, names: Sequence[str]) -> None:
        """More names."""
        pieces = [name.encode("utf-8", "surrogatepass") for name in names]
        self._data.write(b"".join(pieces))
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces))) + self._size
        self._ends.write(ends.astype("<i8").tobytes())
        if len(ends):
            self._size = int(ends[-1])
        self.count += len(pieces)
        self._digest.update(names)

    def finish(self, about: Mapping[str, object]) -> Manifest:
        """Write the file; gives what it has."""
        self._data.write(b"\0" * (-(len(_MAGIC) + self._size) % _ALIGNED))
        self._data.write(bytes(8))
        self._ends.seek(0)
        shutil.copyfileobj(self._ends, self._data, _COPY_BYTES)
        fields = {**about, "count": self.count, "bytes": self._size, "digest": self._digest.text(self.count)}
        footer = json.dumps(fields).encode()
        self._data.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)
        self._data.close()
        Path(self._data.name).replace(self._path)
        return Manifest(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in (self._data, self._ends):
            file.close()
            Path(file.name).unlink(missing_ok=True)


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


def _read(path: Path) -> tuple[Packed[str], str, dict[str, Any]]:
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 16))
        tail = file.read()
        length = int.from_bytes(tail[:8], "little")
        if size < 40 or tail[8:] != _MAGIC or length > min(size - 32, 2**20):
            raise _damage(path)
        file.seek(size - 16 - length)
        try:
            about = json.loads(file.read(length))
            count, nbytes = as_number(about["count"]), as_number(about["bytes"])
            digest = as_text(about["digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise _damage(path) from error
    begin = -(-(len(_MAGIC) + (nbytes or 0)) // _ALIGNED) * _ALIGNED
    if count is None or nbytes is None or digest is None or begin + 8 * (count + 1) + length + 16 != size:
        raise _damage(path)
    data = np.memmap(path, np.uint8, "r", len(_MAGIC), (nbytes,)) if nbytes else np.zeros(0, np.uint8)
    offsets = np.memmap(path, np.int64, "r", begin, (count + 1,))
    if int(offsets[0]) or int(offsets[-1]) != nbytes:
        raise _damage(path)
    return Packed("str", data, offsets), digest, about


def _damage(path: Path) -> FormatError:
    return FormatError(f"{path} is no list of names of headrace's, or damaged; remove it", url=str(path))
