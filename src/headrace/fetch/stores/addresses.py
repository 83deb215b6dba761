"""The store of an address, and schemes that users and packages add."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace._util import check
from headrace.errors import OptionError, StorageError, masked
from headrace.options import FetchOptions
from headrace.types import Store

if TYPE_CHECKING:
    from headrace.fetch.web.connections import Connections

CLOUD_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"})
WEB_SCHEMES = frozenset({"http", "https"})
BUILT_IN = CLOUD_SCHEMES | WEB_SCHEMES | {"file", "memory", "hf", "pipe"}
_NAME = re.compile(r"[a-z][a-z0-9+.-]+")

StoreFactory = Callable[[str, Mapping[str, Any]], Store]

_registered: dict[str, StoreFactory] = {}


def is_local(store: Store) -> bool:
    """True if a store is on this machine. It gets no hedges, and its objects are not cached."""
    return bool(getattr(store, "is_local", False))


def gives_ends(store: Store) -> bool:
    return bool(getattr(store, "gives_ends", False))


def host_of(store: Store) -> str | int:
    """Key of the shared limits: the store's `host`, or the store itself."""
    return getattr(store, "host", None) or id(store)


def register_store(scheme: str, factory: StoreFactory) -> None:
    """Read addresses `scheme://place/path` by the store that `factory` creates, in this process.

    It replaces an fsspec file system of the same scheme, and an earlier registration. Only the trainer's process reads
    bytes, so workers need no registration. An installed package can provide its factory as an entry point of the group
    `headrace.stores` instead. `headrace.testing.StoreContract` tests a store.

    Args:
        scheme: Two or more lower-case characters; none of headrace's own (s3, gs, az, https, file, hf, …).
        factory: Called with the root `scheme://place` and the `storage_options`, once per reader and root, on the event
            loop. Paths in the store are what follows the root and a slash.

    Raises:
        OptionError: the scheme is invalid, or one of headrace's own.

    Example:
        >>> from headrace.fetch.stores.memory import MemoryStore
        >>> register_store("shelf", lambda root, storage_options: MemoryStore())
    """
    if not _NAME.fullmatch(scheme) or scheme in BUILT_IN:
        taken = ", ".join(sorted(BUILT_IN))
        raise check.invalid("scheme", scheme, f"two or more of a-z, 0-9, '+', '.', '-', a letter first, not {taken}")
    _registered[scheme] = factory


def registered(scheme: str) -> StoreFactory | None:
    if scheme in _registered:
        return _registered[scheme]
    for entry in entry_points(group="headrace.stores", name=scheme):
        factory: StoreFactory = entry.load()
        return factory
    return None


_KINDS = ("pyo3_runtime.PanicException", "pyo3_async_runtimes.RustPanic")


def panic_in(error: BaseException, url: str, store: object) -> StorageError | None:
    """Return a StorageError for a Rust panic, or None. Panic classes are compared by name."""
    if not any(f"{kind.__module__}.{kind.__name__}" in _KINDS for kind in type(error).__mro__):
        return None
    said = str(error).partition("\n")[0][:200]
    return StorageError(f"{type(store).__name__}: a library in Rust, which it reads with, panicked: {said}", url=url)


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://)?")
_WEB = re.compile(r"(https?)(://[^/?#\\]*)/?([^#]*)", re.IGNORECASE)
_LOCAL_ROOTS = {"file": "file:", "memory": "memory:", "hf": "hf:", "pipe": "pipe:"}


def split(url: str) -> tuple[str, str, str]:
    """Split an address into scheme, root of the store and path.

    `s3://bucket/a/b` is ("s3", "s3://bucket", "a/b"). A plain path has the scheme "file". Addresses with one root share
    a store and its credentials. Paths stay unchanged, except that `file://` is unescaped.
    """
    match = _WEB.match(url)
    if match is not None:
        scheme = match[1].lower()
        return scheme, scheme + match[2], match[3]
    match = _SCHEME.match(url)
    # "C:\data" does not match: a scheme has two letters or more. "a:b.tar" is a file's name.
    if match is None or not (match[0].endswith("//") or match[1].lower() in ("file", "pipe")):
        return "file", "file:", url
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme == "file":
        rest = _file_path(url)
    elif scheme == "pipe":
        rest = url.partition(":")[2]
    if scheme in _LOCAL_ROOTS:
        return scheme, _LOCAL_ROOTS[scheme], rest
    place, _, path = rest.partition("/")
    return scheme, f"{scheme}://{place}", path


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise OptionError(f"{masked(url)!r} names a host; a local file is file:///path")
    return unquote(url.partition(":")[2].removeprefix("//").removeprefix(parts.netloc))


class Stores:
    """The stores of one reader, opened at first use, and their shared connections.

    Args:
        storage_options: Settings: obstore's for S3, GCS and Azure, fsspec's for its schemes. For HTTP also `headers`,
            `ssl_context` and `client_options`.
    """

    def __init__(self, options: FetchOptions, storage_options: Mapping[str, Any] | None) -> None:
        self._options = options
        self._storage_options = dict(storage_options or {})
        self._normal: dict[str, Any] | None = None
        self._opened: dict[str, Store] = {}
        self._shared: Connections | None = None

    def of(self, url: str) -> tuple[Store, str]:
        """Return the store of `url` and the path in it.

        Raises:
            OptionError: the scheme is unknown, or a storage option is invalid.
        """
        scheme, root, path = split(url)
        store = self._opened.get(root)
        if store is None:
            store = self._opened[root] = self._open(scheme, root, url)
        return store, path

    async def aclose(self) -> None:
        async with AsyncExitStack() as closing:
            if self._shared is not None:
                closing.push_async_callback(self._shared.aclose)
            for store in self._opened.values():
                closing.push_async_callback(store.aclose)
            self._opened.clear()
            self._shared = None

    def _open(self, scheme: str, root: str, url: str) -> Store:
        try:
            return self._store(scheme, root)
        except BaseException as error:
            if failure := panic_in(error, url, self):
                raise failure from None
            raise

    def _store(self, scheme: str, root: str) -> Store:
        if scheme == "file":
            from headrace.fetch.stores.local import LocalStore

            return LocalStore()
        if scheme == "memory":
            from headrace.fetch.stores.memory import MemoryStore

            return MemoryStore()
        if scheme == "pipe":
            return self._pipe()
        if scheme in WEB_SCHEMES:
            return self._web_store(root)
        if scheme in ("s3", "s3a"):
            return self._s3(root)
        if scheme in CLOUD_SCHEMES:
            return self._remote(root)
        if scheme == "hf":
            return self._hugging_face()
        factory = registered(scheme)
        if factory is not None:
            return factory(root, dict(self._storage_options))
        from headrace.fetch.stores.fsspec_store import FsspecStore

        return FsspecStore(root, scheme, self._storage_options)

    def _pipe(self) -> Store:
        if not self._options.allow_pipe:
            raise OptionError(
                "pipe: addresses run a shell command, which headrace does only with fetch=FetchOptions(allow_pipe=True)"
            )
        from headrace.fetch.stores.pipe import PipeStore

        return PipeStore()

    def _web_store(self, root: str) -> Store:
        from headrace.fetch.web.client import WebStore, proxy_for

        try:
            is_proxied = proxy_for(root) is not None
        except ValueError:
            raise OptionError(f"no address: {masked(root)}") from None
        if not is_proxied and self._fits_our_client:
            return WebStore(root, self._connections, self._headers)
        from headrace.fetch.stores.object_stores import RemoteWebStore

        return RemoteWebStore(root, self._options, self._for_obstore())

    def _s3(self, root: str) -> Store:
        from headrace.fetch.stores.s3 import S3Store
        from headrace.fetch.web.client import Web, proxy_for

        if self._fits_our_client:
            settings = self._for_obstore(signing=True)
            store = S3Store(root, self._options, settings, Web(self._connections), headers=self._headers)
            if store.fits and proxy_for(store.endpoint) is None:
                return store
        return self._remote(root)

    def _hugging_face(self) -> Store:
        from headrace.fetch.stores.hf import HuggingFaceStore
        from headrace.fetch.web.client import Web, proxy_for

        store = HuggingFaceStore(self._storage_options, Web(self._connections), headers=self._headers)
        if proxy_for(store.endpoint) is None:
            return store
        # huggingface_hub's own file system supports proxies.
        from headrace.fetch.stores.fsspec_store import FsspecStore

        return FsspecStore("hf:/", "hf", self._storage_options)

    def _remote(self, root: str) -> Store:
        from headrace.fetch.stores.object_stores import RemoteStore

        return RemoteStore(root, self._options, self._for_obstore())

    @property
    def _connections(self) -> Connections:
        if self._shared is None:
            from headrace.fetch.web.connections import Connections

            self._shared = Connections(self._options, self._storage_options.get("ssl_context"))
        return self._shared

    @property
    def _client_options(self) -> dict[str, Any]:
        return dict(self._settings.get("client_options", {}))

    @property
    def _settings(self) -> dict[str, Any]:
        from headrace.fetch.stores.settings import for_obstore

        if self._normal is None:
            self._normal = for_obstore(self._storage_options)
        return self._normal

    @property
    def _fits_our_client(self) -> bool:
        """True if our HTTP client supports all `client_options`. obstore supports more."""
        others = {name for name, value in self._client_options.items() if name != "allow_http" or not value}
        return others <= {"default_headers"}

    @property
    def _headers(self) -> dict[str, str]:
        headers = {**self._client_options.get("default_headers", {}), **self._storage_options.get("headers", {})}
        return {
            str(name): value.decode() if isinstance(value, bytes) else str(value) for name, value in headers.items()
        }

    def _for_obstore(self, *, signing: bool = False) -> dict[str, object]:
        options = {name: value for name, value in self._settings.items() if name not in ("headers", "ssl_context")}
        if signing:
            return {**options, "client_options": {"allow_http": True}}
        if "ssl_context" in self._storage_options:
            raise OptionError(
                "ssl_context is of no use to obstore, which these addresses need (GCS, Azure, a proxy, or other "
                "client_options); give the certificates as client_options={'root_certificate': …}"
            )
        client = self._client_options
        if self._headers:
            client["default_headers"] = self._headers
        return {**options, "client_options": client}
