"""Where the samples of a stream's steps are kept, as those steps are now."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from headrace import descriptors
from headrace.errors import OptionError, printable
from headrace.functions import name_of
from headrace.kept.file import SampleFile, table_end
from headrace.kept.fingerprint import NotKnownError, ValueDigest
from headrace.kept.libraries import version_of
from headrace.kept.places import KeepingPlace
from headrace.types import Buffer

Function = Callable[..., object]


class Keeping:
    """Finds the file of what some functions make, and adds to it, in the process of the loader.

    What functions are is looked at each time that `file` is asked for, and before anything is added: what they use may
    have changed since.

    Args:
        functions: what workers do to each sample.
        on_loop: what is done before that, on the event loop.
        place: where files are.
        version: what stands for what cannot be told of the functions and the data; None: all must be told.
        data: says what the samples are of, once; None: nobody else uses the place.
        count: how many samples there are.
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
        self._functions, self._on_loop = tuple(functions), tuple(on_loop)
        self._place, self._version = place, version
        self._data, self._count = data, count
        self._of_data: bytes | None = None
        self._lock = threading.Lock()
        self._digest, self._quick = b"", b""
        self._file: SampleFile | None = None
        self._has_warned = False

    def file(self) -> SampleFile | None:
        """The file of what these functions make now; None: there can be none, which was warned of.

        Raises:
            OptionError: what they do cannot be told.
        """
        try:
            digest, quick = self._identity(), self._quick_digest()
        except NotKnownError as error:
            raise not_told(error) from error
        with self._lock:
            if digest != self._digest:
                self._digest, self._quick, self._file = digest, quick, self._open(digest)
            self._quick = quick
            return self._file

    def file_at_once(self) -> SampleFile | None:
        """The same, where it is asked for each sample: that a large array was changed in its place is not seen."""
        quick = self._quick_digest()
        return self._file if self._digest and quick == self._quick else self.file()

    def add(self, number: int, pack: Callable[[], Buffer]) -> None:
        """Keep what was made of a sample, unless the functions are others than when its file was asked for.

        Args:
            pack: gives it as bytes.
        """
        file, quick = self._file, self._quick
        if file is None:
            return
        if quick == self._quick_digest():
            self._written(file, number, pack)
        else:
            self._warn("what is done to samples has changed while it was done; what came of it is not kept")

    def __reduce__(self) -> tuple[object, ...]:
        if not descriptors.are_sent():
            return Keeping, (self._functions, self._on_loop, self._place, self._version, self._data, self._count)
        file = self.file()  # it is for workers
        return WorkersKeeping, (self._functions, file, None if self._version is not None else told(self._functions))

    def _identity(self) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        if self._of_data is None:
            self._of_data = b"" if self._data is None else self._data()
        functions = (*self._on_loop, *self._functions)
        parts = (
            str((platform.python_version_tuple()[:2], [version_of(name) for name in ("headrace", "numpy", "torch")])),
            "" if self._version is None else repr([self._version, list(map(name_of, functions))]),
        )
        functions_told = b"" if self._version is not None else told(functions)
        for part in (*(text.encode() for text in parts), self._of_data, functions_told):
            digest.update(b"%d:" % len(part) + part)
        return digest.digest()

    def _quick_digest(self) -> bytes:
        if self._version is not None:
            return b""
        try:
            return told((*self._on_loop, *self._functions), quickly=True)
        except NotKnownError:
            return b"not known"

    def _open(self, identity: bytes) -> SampleFile | None:
        count = self._count()
        try:
            file = self._place.open(identity, count)
        except OSError as error:
            self._warn(f"{self._place} cannot be used ({error}); samples are made anew each time")
            return None
        if not file.has_room(table_end(count)):
            self._warn(f"max_bytes has no room for a table of {count} samples; nothing is kept")
        return file

    def _written(self, file: SampleFile, number: int, pack: Callable[[], Buffer]) -> None:
        try:
            file.add(number, pack())
        except Exception as error:
            self._warn(f"a sample cannot be kept ({type(error).__name__}: {error}); it is made anew each time")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(printable(f".cache(): {what}"), RuntimeWarning, stacklevel=2)


class WorkersKeeping(Keeping):
    """The same in a worker: it adds to the file that it was given, if its functions are what they are in the trainer.

    They may not be: a module that was changed since the trainer has loaded it is another one here.

    Args:
        functions: what is done to each sample, here.
        file: the trainer's; None: there is none.
        told_there: what the functions are there; None: a version stands for it.
    """

    def __init__(self, functions: Sequence[Function], file: SampleFile | None, told_there: bytes | None) -> None:
        self._functions, self._file, self._has_warned = tuple(functions), file, False
        self._is_same: bool | None = True if told_there is None else None
        self._told_there = told_there

    def file(self) -> SampleFile | None:
        return self._file

    file_at_once = file

    def __reduce__(self) -> tuple[object, ...]:
        return WorkersKeeping, (self._functions, self._file, self._told_there)

    def add(self, number: int, pack: Callable[[], Buffer]) -> None:
        if self._is_same is None:
            self._is_same = self._told_here() == self._told_there
            if not self._is_same:
                self._warn("what workers do is not what the trainer would; nothing is kept of it")
        if self._is_same and self._file is not None:
            self._written(self._file, number, pack)

    def _told_here(self) -> bytes | None:
        with contextlib.suppress(NotKnownError):
            return told(self._functions)
        return None


def told(values: Sequence[Any], *, quickly: bool = False) -> bytes:
    """What tells some values from others.

    Raises:
        NotKnownError: they cannot be told.
    """
    found = ValueDigest(quickly=quickly)
    found.add(list(values))
    return found.digest()


def not_told(error: NotKnownError) -> OptionError:
    """The error of a `.cache()` that would not know of a change."""
    return OptionError(
        f".cache(): it would not be known when what is kept is out of date: {error}; give version=, and another one "
        "whenever what is done to samples, or the data, change"
    )
