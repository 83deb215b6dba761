"""Schemes that users and packages add."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from headrace.errors import OptionError
from headrace.types import Store

CLOUD_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"})
WEB_SCHEMES = frozenset({"http", "https"})
BUILT_IN = CLOUD_SCHEMES | WEB_SCHEMES | {"file", "memory", "hf", "pipe"}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")

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
    if not _SCHEME.fullmatch(scheme):
        raise OptionError(f"scheme={scheme!r} must be two or more of a-z, 0-9, '+', '.' and '-', a letter first")
    if scheme in BUILT_IN:
        raise OptionError(f"scheme={scheme!r} is one of headrace's own ({', '.join(sorted(BUILT_IN))})")
    _registered[scheme] = factory


def registered(scheme: str) -> StoreFactory | None:
    if scheme in _registered:
        return _registered[scheme]
    for entry in entry_points(group="headrace.stores", name=scheme):
        factory: StoreFactory = entry.load()
        return factory
    return None
