"""Interfaces between the stages, which do not import each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from headrace.errors import ObjectChangedError, not_as_listed
from headrace.types import Buffer

Ranges = Sequence[tuple[int, int]]
"""Byte ranges [start, stop)."""


class ReportedVersion(NamedTuple):
    """Version of an object as an HTTP response reports it. `modified`: The Last-Modified header, unparsed."""

    etag: str | None = None
    modified: str | None = None

    @staticmethod
    def of(version: str) -> ReportedVersion:
        date = version.removeprefix(_DATED)
        return ReportedVersion(version) if date == version else ReportedVersion(None, date[:-1])

    @property
    def version(self) -> str | None:
        """The ETag, or a weak one made from the date. None without both."""
        return self.etag if self.etag is not None or self.modified is None else f'{_DATED}{self.modified}"'

    def check(self, later: ReportedVersion, url: str) -> None:
        """Check that a later response, whose bytes will be joined, has the same version.

        Dates are not compared if the ETags are equal.

        Raises:
            ObjectChangedError: the ETag or date differs, is missing, or has appeared.
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
    """Return a version to store in indexes. None if made from a date, which copies do not keep."""
    return None if version is None or version.startswith(_DATED) else version


class Span(NamedTuple):
    """Bytes [start, stop) of an object of `size` bytes, read by a ranged request.

    `in_order` is described in `Answer`. `reported` is the version in the response; None if not known, as in a cache.
    """

    start: int
    stop: int
    size: int
    etag: str | None
    in_order: bool = False
    reported: ReportedVersion | None = None


def clamped(start: int, stop: int | None, size: int) -> tuple[int, int]:
    """Return [start, stop) within an object of `size` bytes. A negative `start` counts from the end."""
    first = max(0, size + start) if start < 0 else min(start, size)
    return first, size if stop is None else max(first, min(stop, size))


def check_match(wanted: str | None, version: str | None, url: str) -> None:
    """Raise ObjectChangedError if an object has another version than the wanted one, as far as both are known."""
    if wanted is not None and version is not None and wanted != version:
        raise ObjectChangedError(f"the object changed: its version was {wanted}, now {version}", url=url)


Check = Callable[[Buffer], bool]
"""True if these are the right bytes."""


@dataclass(frozen=True, slots=True)
class Version:
    """The expected version of an object, as far as known, and its origin."""

    size: int | None = None
    etag: str | None = None
    known_by: Literal["indexed", "listed"] = "indexed"

    def check_listed(self, url: str, size: int | None, etag: str | None) -> None:
        """Check that an object that was read has this version, as listed, if both are known. A size below 0 is not."""
        if size is not None and size >= 0 and self.size not in (None, size):
            raise not_as_listed(url, f"it had {self.size} bytes then, and has {size}")
        if etag is not None and self.etag not in (None, etag):
            raise not_as_listed(url, f"its ETag was {self.etag}, now {etag}")


class Opens(Protocol):
    """A data set that must be opened on the loop that uses it."""

    async def aopen(self) -> None: ...

    async def aclose(self) -> None: ...


class Reads(Protocol):
    """The fetch stage as used by data sets."""

    async def read(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        check: Check | None = None,
        version: Version | None = None,
    ) -> bytes: ...

    async def read_into(
        self, url: str, start: int, target: memoryview, *, etag: str | None = None, rest: Any = None
    ) -> Span:
        """Fill `target` with the object's bytes from `start` on. Shorter only at the object's end.

        A negative `start` counts from the end. A shorter object is then read completely.
        """
        ...


def crc32c_of(data: Buffer) -> int:
    import google_crc32c

    return int(google_crc32c.value(bytes(data)))
