"""The store of an address, and schemes that users and packages add."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace._util import check
from headrace.errors import OptionError, StorageError
from headrace.options import Fetch
from headrace.types import Store

if TYPE_CHECKING:
    from headrace.fetch.web.connections import Connections


_SWITCHES = frozenset({"allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses"})
_OF_CLIENT = _SWITCHES | {
    "connect_timeout", "default_content_type", "default_headers", "http2_keep_alive_interval",
    "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_ca_certificate", "proxy_excludes", "proxy_url", "read_timeout", "root_certificate", "timeout", "user_agent",
}  # fmt: skip
_PREFIXES = ("aws_", "azure_", "google_")
_ON, _OFF = ("true", "1", "on", "yes", "y", "t"), ("false", "0", "off", "no", "n", "f")


def for_obstore(options: Mapping[str, Any]) -> dict[str, Any]:
    """Move client settings of any spelling to `client_options`, and convert switches to bool.

    obstore's documentation has `allow_http` in either place, in any case, with a store's prefix, and as text. Its Rust
    code panics on such a setting among those of the store.

    Raises:
        OptionError: a setting is given twice, or a switch is neither true nor false.
    """
    given = options.get("client_options")
    if given is not None and not isinstance(given, Mapping):
        raise check.invalid("storage_options['client_options']", given, "a dict")
    rest: dict[str, object] = {}
    client = {}
    for name, value in (given or {}).items():
        client[name.lower()] = _checked(f"client_options[{name!r}]", name.lower(), value)
    for name, value in options.items():
        plain = _plain(name)
        if plain in _OF_CLIENT:
            setting = _checked(repr(name), plain, value)
            if client.setdefault(plain, setting) != setting:
                raise OptionError(f"storage_options give {plain!r} twice, and not the same: keep it in client_options")
        elif name != "client_options":
            rest[name] = value
    return {**rest, "client_options": client} if client else rest


def _plain(name: str) -> str:
    plain = name.lower()
    return next((plain.removeprefix(prefix) for prefix in _PREFIXES if plain.startswith(prefix)), plain)


def _checked(where: str, name: str, value: object) -> object:
    if name not in _SWITCHES:
        return value
    text = str(value).strip().lower()
    if text not in _ON + _OFF:
        raise check.invalid(f"storage_options {where}", text, "true or false")
    return text in _ON


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
        raise OptionError.at(url, "names a host; a local file is file:///path")
    return unquote(url.partition(":")[2].removeprefix("//").removeprefix(parts.netloc))


class Stores:
    """The stores of one reader, opened at first use, and their shared connections.

    Args:
        storage_options: Settings: obstore's for S3, GCS and Azure, fsspec's for its schemes. For HTTP also `headers`,
            `ssl_context` and `client_options`.
    """

    def __init__(self, options: Fetch, storage_options: Mapping[str, Any] | None) -> None:
        self._options = options
        self._storage_options = dict(storage_options or {})
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
            if not self._options.allow_pipe:
                command = "pipe: addresses run a shell command, and that"
                raise check.lacking(command, "fetch=hr.Fetch(allow_pipe=True)")
            from headrace.fetch.stores.pipe import PipeStore

            return PipeStore()
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

    def _web_store(self, root: str) -> Store:
        from headrace.fetch.web.client import WebStore, proxy_for

        try:
            is_proxied = proxy_for(root) is not None
        except ValueError:
            raise OptionError.at(root, "is no address") from None
        if not is_proxied and self._fits_our_client:
            return WebStore(root, self._connections, self._headers)
        from headrace.fetch.stores.object_stores import RemoteWebStore

        return RemoteWebStore(root, self._options, self._for_obstore())

    def _s3(self, root: str) -> Store:
        from headrace.fetch.stores.object_stores import S3Store
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

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return for_obstore(self._storage_options)

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
