"""Every scheme that fsspec supports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace._util.reads import check_match, clamped
from headrace.errors import AccessDeniedError, ObjectMissingError, OptionError, StorageError, masked_text
from headrace.fetch.stores.memory import one_piece
from headrace.fetch.threads import Threads, retrieved
from headrace.types import Answer, Buffer, Listed

_THREADS = 8
_PIECE_BYTES = 8 * 2**20


class FsspecStore:
    """An fsspec file system, as an instance of this reader's own.

    fsspec's cached instances share one loop and thread in the process, so they are not used. An asynchronous file
    system is created for this event loop; others are called in threads. A range is read in pieces of 8 MiB. Each range
    also requests the object's size and version. Errors of a file system are reported as text without a cause, as they
    may contain secrets.
    """

    def __init__(self, root: str, scheme: str, storage_options: Mapping[str, object]) -> None:
        self._root, self._scheme, self._storage_options = root, scheme, storage_options
        self._class = _class_of(scheme)
        self._threads = None if self._class.async_impl else Threads(f"headrace-{scheme}", _THREADS)
        self._fs: object = None
        self._opening: asyncio.Future[object] | None = None

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        url = f"{self._root}/{path}" if path else self._root
        inner = self._class._strip_protocol(url)
        with self._translating(url):
            size, etag = await self._about(inner)
            check_match(if_match, etag, url)
            whole = None
            if size is None:  # unknown until the whole object is read
                whole = await self._call("cat_file", inner)
                size = len(whole)
        first, last = clamped(start or 0, stop, size)
        body = self._pieces(url, inner, first, last) if whole is None else one_piece(whole[first:last])
        return Answer(first, last, size, etag, body)

    async def _pieces(self, url: str, inner: str, first: int, last: int) -> AsyncIterator[Buffer]:
        """Read the range in pieces, so that progress is visible and memory is reserved in advance."""
        while first < last:
            stop = min(first + _PIECE_BYTES, last)
            with self._translating(url):
                piece: bytes = await self._call("cat_file", inner, first, stop)
            if not piece:
                return
            yield piece
            first += len(piece)

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        """See `Lists.listing`. A page is a folder."""
        folders = [(prefix.rstrip("/"), 1)]
        while folders:
            folder, level = folders.pop()
            files, inner = await self._entries(folder)
            if files:
                yield files
            if levels is None or level < levels:
                folders += [(name, level + 1) for name in inner]

    async def _entries(self, folder: str) -> tuple[list[Listed], list[str]]:
        url = f"{self._root}/{folder}" if folder else self._root
        files: list[Listed] = []
        inner: list[str] = []
        with self._translating(url):
            place = self._class._strip_protocol(url)
            try:
                entries = await self._call("ls", place, True)
            except (FileNotFoundError, NotADirectoryError):
                return [], []
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            path = f"{folder}/{name}" if folder else name
            if entry.get("type") == "directory":
                inner.append(path)
            elif str(entry["name"]).strip("/") != place.strip("/"):  # some list a file as its own entry
                files.append(_listed(path, entry))
        return files, inner

    @contextmanager
    def _translating(self, url: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, OptionError):
            raise
        except TimeoutError as error:
            raise TimeoutError(self._masked(error)) from None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissingError("no such object", url=url) from None
        except PermissionError:
            raise AccessDeniedError("the store refused the read", url=url) from None
        except Exception as error:
            # Each file system has its own client and errors. All of them mean that this read failed.
            raise StorageError(f"{type(error).__name__}: {self._masked(error)}", url=url) from None

    async def aclose(self) -> None:
        if self._threads is not None:
            self._threads.close()
        close = getattr(getattr(self._fs, "_session", None), "close", None)
        self._fs = self._opening = None
        if asyncio.iscoroutinefunction(close):
            await close()

    def _open(self) -> object:
        try:
            kwargs = {**self._class._get_kwargs_from_urls(self._root), **self._storage_options}
            if self._threads is None:
                kwargs["asynchronous"] = True
            return self._class(skip_instance_cache=True, **kwargs)
        except (TypeError, ValueError, ImportError) as error:
            raise not_opened(self._scheme, error, self._storage_options) from None

    async def _call(self, method: str, *args: Any) -> Any:
        if self._threads is None:
            self._fs = self._fs or self._open()
            return await getattr(self._fs, f"_{method}")(*args)
        if self._opening is None:
            self._opening = self._threads.call(self._open)  # some file systems connect when created
            self._opening.add_done_callback(retrieved)
        try:
            file_system = await asyncio.shield(self._opening)
        except Exception:
            self._opening = None
            raise
        call: Callable[..., object] = getattr(file_system, method)
        return await self._threads.call(call, *args)

    def _masked(self, error: Exception) -> str:
        return masked_text(str(error), self._storage_options)

    async def _about(self, path: str) -> tuple[int | None, str | None]:
        about = await self._call("info", path)
        if about.get("type") == "directory":
            raise IsADirectoryError(path)
        return _size_and_version(about)


def _size_and_version(about: Mapping[str, Any]) -> tuple[int | None, str | None]:
    version = _etag(about) or about.get("mtime") or about.get("created")
    size = about.get("size")
    return None if size is None else int(size), None if version is None else str(version)


def _listed(path: str, about: Mapping[str, Any]) -> Listed:
    """Return a folder's entry, with only the facts that `info` would report equally.

    A listing may report the size of a link itself instead of its target's (as SFTP does). Times have other kinds or
    resolutions in some listings.
    """
    if about.get("type") == "link":
        return Listed(path)
    return Listed(path, _size_and_version(about)[0], _etag(about))


def _etag(about: Mapping[str, Any]) -> str | None:
    etag = about.get("ETag") or about.get("etag")
    return None if etag is None else str(etag)


def not_opened(scheme: str, error: Exception, storage_options: Mapping[str, object]) -> OptionError:
    """Return the error of a file system that cannot be made."""
    reason = masked_text(str(error), storage_options)
    return OptionError(f"fsspec cannot open {scheme}:// with these storage_options: {reason}")


def _class_of(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise OptionError(f"{scheme}:// needs a package that is not installed: {error}") from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise OptionError(
            f"no store for the scheme {scheme!r}; known are s3, gs, az, http, https, file, memory, "
            f"and to fsspec {known}"
        ) from error
