"""Which store an address belongs to."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import unquote, urlsplit

from headrace.errors import OptionError, masked
from headrace.options import FetchOptions
from headrace.types import Store

CLOUD_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"})
WEB_SCHEMES = frozenset({"http", "https"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://)?")
# Addresses that are sent as they stand, told at an eighth of the cost of taking them apart.
_PLAIN = re.compile(
    r"(https?)(://[A-Za-z0-9_.:-]+)/((?:[A-Za-z0-9_~-][A-Za-z0-9_.~-]*/)*[A-Za-z0-9_~-][A-Za-z0-9_.~-]*)"
)
_SINGLE_USE = 64


def split(url: str) -> tuple[str, str, str]:
    """The scheme, the store's root and the path within it.

    `s3://bucket/a/b` is ("s3", "s3://bucket", "a/b"); a plain path has the scheme "file". Objects with the same root
    share a store, its connections and its credentials.
    """
    plain = _PLAIN.fullmatch(url)
    if plain is not None:
        return plain[1], plain[1] + plain[2], plain[3]
    match = _SCHEME.match(url)
    if match is None:
        return "file", "file:", url
    scheme = match[1].lower()
    if scheme == "pipe":
        raise OptionError("pipe: addresses run a shell command, which headrace never does")
    if not match[0].endswith("//") and scheme != "file":
        # "C:\data" does not match: a scheme has two letters or more. "a:b.tar" is a file's name.
        return "file", "file:", url
    if scheme in WEB_SCHEMES:
        return scheme, *_split_web(url)
    rest = url[match.end() :]
    if scheme == "file":
        return scheme, "file:", _file_path(url)
    if scheme == "memory":
        return scheme, "memory:", rest
    bucket, _, path = rest.partition("/")
    root = f"{scheme}://{bucket}"
    # Keys of objects are taken as they are: no escapes, and "?" and "#" are letters.
    return scheme, root, path if scheme in CLOUD_SCHEMES else url


def _split_web(url: str) -> tuple[str, str]:
    """An origin and the path to ask it for; a query stays with the origin.

    obstore escapes paths itself and drops empty segments, so a path that would not come out as it went in
    (`%2F`, `//`, a trailing `/`, dots, what is not UTF-8) is a root of its own with an empty path: sent untouched.
    """
    parts = urlsplit(url)
    query = f"/?{parts.query}" if parts.query else ""
    raw = parts.path[1:]
    try:
        path = unquote(raw, errors="strict")
    except UnicodeDecodeError:
        path = ""
    segments = path.split("/")
    if "%2f" in raw.lower() or any(segment in ("", ".", "..") for segment in segments):
        return url.partition("#")[0], ""
    return f"{parts.scheme}://{parts.netloc}{query}", path


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise OptionError(f"{url!r} names the host {parts.netloc!r}; a local file is file:///path")
    return unquote(url.partition(":")[2].removeprefix("//").removeprefix(parts.netloc))


def open_store(root: str, scheme: str, options: FetchOptions, storage_options: Mapping[str, Any]) -> Store:
    """A new store for all objects under `root`.

    A scheme that headrace does not know itself is looked up among the entry points `headrace.stores` (called with the
    root and the storage options) and then in fsspec.

    Raises:
        OptionError: nobody knows the scheme, or a storage option is wrong.
    """
    if scheme == "file":
        from headrace.fetch.local import LocalStore

        return LocalStore()
    if scheme == "memory":
        from headrace.fetch.memory import MemoryStore

        return MemoryStore()
    if scheme in CLOUD_SCHEMES or scheme in WEB_SCHEMES:
        from headrace.fetch.object_stores import RemoteStore

        return RemoteStore(root, options, storage_options)
    for entry in entry_points(group="headrace.stores", name=scheme):
        store: Store = entry.load()(root, dict(storage_options))
        return store
    from headrace.fetch.fsspec_store import FsspecStore

    return FsspecStore(root, scheme, storage_options)


class Stores:
    """The stores of one reader, opened when first asked for."""

    def __init__(self, options: FetchOptions, storage_options: Mapping[str, Any] | None) -> None:
        self._options = options
        self._storage_options = dict(storage_options or {})
        self._lasting: dict[str, Store] = {}
        # Signed addresses are roots of their own, and there may be one for each object: only the latest are kept.
        # One that is dropped ends with its last request: remote stores have nothing to close.
        self._passing: OrderedDict[str, Store] = OrderedDict()

    def of(self, url: str) -> tuple[Store, str]:
        """The store that holds `url`, and the path to ask it for."""
        try:
            scheme, root, path = split(url)
        except ValueError as error:
            raise error if isinstance(error, OptionError) else OptionError(f"no address: {masked(url)}") from None
        store = self._lasting.get(root)
        if store is not None:
            return store, path
        if scheme in WEB_SCHEMES and ("?" in root or not path):
            store = self._passing.pop(root, None) or open_store(root, scheme, self._options, self._storage_options)
            self._passing[root] = store
            if len(self._passing) > _SINGLE_USE:
                self._passing.popitem(last=False)
            return store, path
        store = self._lasting[root] = open_store(root, scheme, self._options, self._storage_options)
        return store, path

    async def aclose(self) -> None:
        """Close them all, also after one that fails to."""
        async with AsyncExitStack() as closing:
            for store in [*self._lasting.values(), *self._passing.values()]:
                closing.push_async_callback(store.aclose)
            self._lasting.clear()
            self._passing.clear()
