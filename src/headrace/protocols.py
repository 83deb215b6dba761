"""The faces that the stages show one another; no stage imports another, they meet here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from headrace.errors import ObjectChangedError
from headrace.types import Buffer


class Told(NamedTuple):
    """What an answer says of the object's version.

    Attributes:
        etag: its ETag.
        modified: when it was last modified, as the server writes it.
    """

    etag: str | None = None
    modified: str | None = None

    @staticmethod
    def of(version: str) -> Told:
        """What an answer has told whose `version` this is."""
        date = version.removeprefix(_DATED)
        return Told(version) if date == version else Told(None, date[:-1])

    @property
    def version(self) -> str | None:
        """The ETag, or a weak one that is made of the date; None if there is neither."""
        return self.etag if self.etag is not None or self.modified is None else f'{_DATED}{self.modified}"'

    def check(self, later: Told, url: str) -> None:
        """Check that a later answer, whose bytes are joined to those of this one, is of the same version.

        Of two answers with the same ETag the dates are not compared.

        Raises:
            ObjectChangedError: its ETag or date is another one, is missing, or has appeared.
        """
        if self.version != later.version:
            if self.etag is not None:
                reason = f"its ETag was {self.etag}, now {later.etag or 'it has none'}"
            elif self.modified is not None:
                now = later.etag or later.modified or "it has no date"
                reason = f"it was last modified {self.modified}, now {now}; if mirrors answer, name one of them"
            else:
                reason = f"it had no version, now {later.version}"
            error = ObjectChangedError(f"the object changed: {reason}", url=url)
            error.is_certain = (self.etag is None) == (later.etag is None) and None not in (self.version, later.version)
            raise error


_DATED = 'W/"modified '


def lasting(version: str | None) -> str | None:
    """A version as indexes keep it: None if it is made of a date, which a copy of the object does not have."""
    return None if version is None or version.startswith(_DATED) else version


class Span(NamedTuple):
    """What a ranged read got: bytes [start, stop) of an object of `size` bytes; `in_order` as `Answer` has it.

    `told` is what the answer said of its version; None where it is not known, as of what was kept.
    """

    start: int
    stop: int
    size: int
    etag: str | None
    in_order: bool = False
    told: Told | None = None


Check = Callable[[Buffer], bool]
"""Whether these are the right bytes."""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of an object that is meant, as far as it is known, and what has told it."""

    size: int | None = None
    etag: str | None = None
    known_by: Literal["indexed", "listed"] = "indexed"


class Opens(Protocol):
    """A data set with something to open on the loop that uses it."""

    async def aopen(self) -> None: ...

    async def aclose(self) -> None: ...


class Reads(Protocol):
    """The fetch stage as data sets see it."""

    async def read(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        check: Check | None = None,
        version: Version | None = None,
    ) -> bytes:
        """The bytes [start, stop) of the object at `url`."""
        ...

    async def read_into(
        self, url: str, start: int, target: memoryview, *, etag: str | None = None, rest: Any = None
    ) -> Span:
        """Fill `target` with the object's bytes from `start` on; shorter only where the object ends.

        A negative `start` is so many bytes before the end; of a shorter object all bytes come.
        """
        ...


class ObjectReads(Protocol):
    """One object, read in the version that its first read saw.

    Attributes:
        url: its address.
        size, etag: of the object, once something was read; -1 and None before.
    """

    url: str
    size: int
    etag: str | None

    async def read(self, start: int, length: int) -> memoryview:
        """The bytes from `start` on: `length` of them, fewer where the object ends."""
        ...


class LoaderReads(Reads, Protocol):
    """The reader of a loader, as the data sets see it that are run for it.

    Attributes:
        storage_options: what its stores are told.
    """

    @property
    def storage_options(self) -> Mapping[str, object]: ...

    def count_call(self, name: str, seconds: float, waited: float) -> None:
        """Count a call of a data set's function in a thread, which computed for `seconds` and waited for `waited`."""
        ...
