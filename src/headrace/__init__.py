"""Streams remote data sets into PyTorch training loops, in order, at the speed of the wire or of the CPU.

    import headrace as hr

    data = hr.stream("s3://bucket/train-{000000..001281}.tar").shuffle().decode("rgb8").to_tuple("jpg;png", "cls")
    for images, labels in hr.DataLoader(data, batch_size=256, num_workers=8):
        ...

Names are imported when they are first used: `import headrace` pays for neither torch nor any client of a store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
    from headrace.datasets.mixture import mix
    from headrace.datasets.packed import Packed, packed
    from headrace.datasets.stream import Stream, files, from_iterable, from_map, stream
    from headrace.errors import (
        AccessDeniedError,
        BadResponseError,
        CannotCarryError,
        ChecksumError,
        CollateError,
        DecodeError,
        FormatError,
        HeadraceError,
        LateOptionError,
        LimitError,
        LoaderBusyError,
        LoaderClosedError,
        NotReady,
        ObjectChangedError,
        ObjectMissingError,
        OptionError,
        ReadTimeoutError,
        ShortReadError,
        StageError,
        StateMismatchError,
        StorageError,
        ThrottledError,
        WorkerDiedError,
    )
    from headrace.fetch import read
    from headrace.fetch.stores.registry import register_store
    from headrace.formats.limits import Limits
    from headrace.loader import DataLoader
    from headrace.options import FetchOptions
    from headrace.state import merge_states
    from headrace.work.randomness import rng

_HOMES = {
    "headrace.datasets.base": ("AsyncDataset", "AsyncIterableDataset"),
    "headrace.datasets.mixture": ("mix",),
    "headrace.datasets.packed": ("Packed", "packed"),
    "headrace.datasets.stream": ("Stream", "files", "from_iterable", "from_map", "stream"),
    "headrace.errors": (
        "AccessDeniedError",
        "BadResponseError",
        "CannotCarryError",
        "ChecksumError",
        "CollateError",
        "DecodeError",
        "FormatError",
        "HeadraceError",
        "LateOptionError",
        "LimitError",
        "LoaderBusyError",
        "LoaderClosedError",
        "NotReady",
        "ObjectChangedError",
        "ObjectMissingError",
        "OptionError",
        "ReadTimeoutError",
        "ShortReadError",
        "StageError",
        "StateMismatchError",
        "StorageError",
        "ThrottledError",
        "WorkerDiedError",
    ),
    "headrace.fetch": ("read",),
    "headrace.fetch.stores.registry": ("register_store",),
    "headrace.formats.limits": ("Limits",),
    "headrace.loader": ("DataLoader",),
    "headrace.options": ("FetchOptions",),
    "headrace.state": ("merge_states",),
    "headrace.work.randomness": ("rng",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AccessDeniedError",
    "AsyncDataset",
    "AsyncIterableDataset",
    "BadResponseError",
    "CannotCarryError",
    "ChecksumError",
    "CollateError",
    "DataLoader",
    "DecodeError",
    "FetchOptions",
    "FormatError",
    "HeadraceError",
    "LateOptionError",
    "LimitError",
    "Limits",
    "LoaderBusyError",
    "LoaderClosedError",
    "NotReady",
    "ObjectChangedError",
    "ObjectMissingError",
    "OptionError",
    "Packed",
    "ReadTimeoutError",
    "ShortReadError",
    "StageError",
    "StateMismatchError",
    "StorageError",
    "Stream",
    "ThrottledError",
    "WorkerDiedError",
    "files",
    "from_iterable",
    "from_map",
    "merge_states",
    "mix",
    "packed",
    "read",
    "register_store",
    "rng",
    "stream",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
