"""Every scheme that fsspec knows, through instances of our own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectMissingError,
    OptionError,
    StorageError,
)
from headrace.types import Answer, Buffer

_THREADS = 8
_REMEMBERED = 4096


class FsspecStore:
    """An fsspec file system; the path is the whole address.

    fsspec's cached instances run on a loop and thread of fsspec's own, shared by the process, so none of them is used:
    an asynchronous file system is made for our loop, any other is called in threads that end with the store. A range
    comes in one piece. Its size is asked for once for each object.
    """

    def __init__(self, root: str, scheme: str, storage_options: Mapping[str, Any]) -> None:
        self._root, self._scheme, self._storage_options = root, scheme, storage_options
        self._class = _class_of(scheme)
        self._fs: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[str, tuple[int, str | None]] = OrderedDict()

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`."""
        try:
            if self._fs is None:
                self._open()
            inner = self._class._strip_protocol(path)
            size, etag = await self._about(inner, if_match)
            if if_match is not None and etag is not None and if_match != etag:
                raise ObjectChangedError(f"the object changed: its version was {if_match}, now {etag}", url=path)
            first = min(start or 0, size)
            last = size if stop is None else max(first, min(stop, size))
            body = b"" if first == last else await self._call("cat_file", inner, first, last)
        except (StorageError, OptionError):
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissingError("no such object", url=path) from error
        except PermissionError as error:
            raise AccessDeniedError("the store refused the read", url=path) from error
        except TimeoutError:
            raise
        except Exception as error:
            # Each file system has its own client, with errors of its own: all of them mean that this read failed.
            raise StorageError(f"{type(error).__name__}: {error}", url=path) from error
        return Answer(first, last, size, etag, _one(body))

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)  # one of them may be stuck in a read
        close = getattr(getattr(self._fs, "_session", None), "close", None)
        self._fs = self._threads = None
        if asyncio.iscoroutinefunction(close):
            await close()

    def _open(self) -> None:
        kwargs = {**self._class._get_kwargs_from_urls(self._root), **self._storage_options}
        if self._class.async_impl:
            kwargs["asynchronous"] = True
        else:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"headrace-{self._scheme}")
        try:
            self._fs = self._class(skip_instance_cache=True, **kwargs)
        except (TypeError, ValueError, ImportError) as error:
            raise OptionError(f"fsspec cannot open {self._scheme}:// with these storage_options: {error}") from error

    async def _call(self, method: str, *args: Any) -> Any:
        if self._class.async_impl:
            return await getattr(self._fs, f"_{method}")(*args)
        call: Callable[..., Any] = getattr(self._fs, method)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _about(self, path: str, if_match: str | None) -> tuple[int, str | None]:
        """The object's size and version: asked anew by each new read, remembered while that version is asked for."""
        known = self._known.get(path)
        if known is not None and if_match is not None and if_match == known[1]:
            return known
        about = await self._call("info", path)
        if about.get("type") == "directory":
            raise IsADirectoryError(path)
        version = about.get("ETag") or about.get("etag") or about.get("mtime") or about.get("created")
        known = self._known[path] = (int(about["size"]), None if version is None else str(version))
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known


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


async def _one(piece: Buffer) -> AsyncIterator[Buffer]:
    if len(piece):
        yield piece
