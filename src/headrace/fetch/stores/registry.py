"""Schemes that others have added."""

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
    """Whether a store is of this machine: it is asked once only, and what it gives is not kept a second time."""
    return bool(getattr(store, "is_local", False))


def gives_ends(store: Store) -> bool:
    """Whether a store gives an object's last bytes without being told where they begin."""
    return bool(getattr(store, "gives_ends", False))


def host_of(store: Store) -> str | int:
    """Who bears what a store is asked: the stores of one host share its limits; one without a host has its own."""
    return getattr(store, "host", None) or id(store)


def register_store(scheme: str, factory: StoreFactory) -> None:
    """Have addresses `scheme://place/path` read by the store that `factory` makes, in this process from now on.

    It wins over a file system of fsspec with the same scheme; a second registration wins over the first. Bytes are read
    in the trainer's process alone, so nothing has to be registered in the workers. A package that is installed can
    name its factory as an entry point of the group `headrace.stores` instead. `headrace.testing.StoreContract` tests
    a store.

    Args:
        scheme: two letters or more, in lower case; none of headrace's own (s3, gs, az, https, file, hf, …).
        factory: called with the root, `scheme://place`, and the `storage_options`, once for each reader and root, on
            the event loop. The store's paths are what follows the root and a slash.

    Raises:
        OptionError: the scheme is no scheme, or one of headrace's own.

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
    """The factory for a scheme that is not built in, if somebody gave one."""
    if scheme in _registered:
        return _registered[scheme]
    for entry in entry_points(group="headrace.stores", name=scheme):
        factory: StoreFactory = entry.load()
        return factory
    return None
