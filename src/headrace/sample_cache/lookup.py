"""Finds the cache file of a stream's samples, by a key of data and functions."""

from __future__ import annotations

import functools
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from typing import Any

from headrace._util import file_limits as descriptors
from headrace._util.functions import name_of
from headrace.errors import OptionError, printable
from headrace.sample_cache.file import SampleFile, table_end
from headrace.sample_cache.fingerprint import NotKnownError, ValueDigest
from headrace.sample_cache.location import KeepingPlace
from headrace.types import Buffer

Function = Callable[..., object]

_PACKAGES = "headrace", "numpy", "torch", "pillow", "soundfile", "torchcodec"  # packages that decode samples


class Writer:
    """Adds samples to a file, if this process's functions equal those of the file.

    They may differ: a worker may have imported another version of a module, or a call may change a function.

    Args:
        file: None: nothing can be stored.
        expected: Digest of the functions in the trainer. None: the user's `version` replaces it.
    """

    def __init__(self, functions: Sequence[Function], file: SampleFile | None, expected: bytes | None) -> None:
        self._functions, self._file, self._expected = tuple(functions), file, expected
        self._is_same: bool | None = None if expected is not None else True
        self._has_warned = False

    def file(self) -> SampleFile | None:
        return self._file

    def last_file(self) -> SampleFile | None:
        return self._file

    def add(self, number: int, pack: Callable[[], Buffer]) -> None:
        file = self._file
        if file is None:
            return
        if self._is_same is None:  # computed after the first call, which may have changed them
            self._is_same = False
            with suppress(NotKnownError):
                self._is_same = fingerprint_of(self._functions) == self._expected
            if not self._is_same:
                self._warn("what is done to samples has changed since the epoch began; nothing is kept of it")
        if not self._is_same:
            return
        try:
            file.add(number, pack())
        except Exception as error:
            self._warn(f"a sample cannot be kept ({type(error).__name__}: {error}); it is made again each time")

    def __reduce__(self) -> tuple[object, ...]:
        return Writer, (self._functions, self._file, self._expected)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(printable(f".cache(): {what}"), RuntimeWarning, stacklevel=2)


class Keeping(Writer):
    """Finds the file for some functions, in the loader's process. Workers get a `Writer` for it.

    Args:
        functions: Functions that workers apply to each sample.
        on_loop: Earlier functions, on the event loop.
        version: Replaces the digests of functions and data. None: all must have digests.
        data: Returns the digest of the data, once. None: the place is not shared.
        count: Returns the number of samples.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        on_loop: Sequence[Function],
        place: KeepingPlace,
        version: str | None,
        data: Callable[[], bytes] | None,
        count: Callable[[], int],
    ) -> None:
        super().__init__(functions, None, None)
        self._on_loop, self._place, self._version = tuple(on_loop), place, version
        self._data, self._count = data, count
        self._of_data: bytes | None = None
        self._lock = threading.Lock()
        self._key = b""

    def file(self) -> SampleFile | None:
        """Return the file for the functions' current digest; None, after a warning, without one."""
        try:
            expected = None if self._version is not None else fingerprint_of(self._functions)
            key = self._key_with(expected)
        except NotKnownError as error:
            raise not_told(error) from error
        with self._lock:
            if key != self._key:
                self._key, self._expected, self._file = key, expected, self._open(key)
            self._is_same = True if expected is None else None
            return self._file

    def last_file(self) -> SampleFile | None:
        """Return the last file, without computing digests for each sample."""
        return self._file if self._key else self.file()

    def __reduce__(self) -> tuple[object, ...]:
        if not descriptors.are_sent():
            return Keeping, (self._functions, self._on_loop, self._place, self._version, self._data, self._count)
        file = self.file()
        return Writer, (self._functions, file, self._expected)

    def _key_with(self, expected: bytes | None) -> bytes:
        if self._of_data is None:
            self._of_data = b"" if self._data is None else self._data()
        versions = platform.python_version_tuple()[:2], [_version(name) for name in _PACKAGES]
        names = None if self._version is None else [self._version, *map(name_of, (*self._on_loop, *self._functions))]
        digest = blake2b(repr((versions, names)).encode(), digest_size=32)
        on_loop = b"" if expected is None else fingerprint_of(self._on_loop)
        for part in (self._of_data, on_loop, expected or b""):
            digest.update(b"%d:" % len(part) + part)
        return digest.digest()

    def _open(self, key: bytes) -> SampleFile | None:
        count = self._count()
        try:
            file = self._place.open(key, count)
        except OSError as error:
            self._warn(f"{self._place} cannot be used ({error}); samples are made again each time")
            return None
        if not file.has_room(table_end(count)):
            self._warn(f"max_bytes has no room for a table of {count} samples; nothing is kept")
        return file


def fingerprint_of(values: Sequence[Any]) -> bytes:
    """Return the digest of some values."""
    return ValueDigest().of(list(values))


def not_told(error: NotKnownError) -> OptionError:
    return OptionError(
        f".cache(): it would not be known when what is kept is out of date: {error}; give version=, and another one "
        "whenever what is done to samples, or the data, change"
    )


@functools.cache
def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
