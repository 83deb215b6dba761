"""Streams remote data sets into PyTorch training loops, in order, at the speed of the wire or of the CPU.

    import headrace as hr

    data = hr.stream("s3://bucket/train-{000000..001281}.tar").shuffle().decode("rgb8").to_tuple("jpg;png", "cls")
    for images, labels in hr.DataLoader(data, batch_size=256, num_workers=8):
        ...

Names are imported when they are first used: `import headrace` pays for neither torch nor any client of a store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__: str  # computed at first use, as it reads files

if TYPE_CHECKING:
    from headrace.dataset.asynchronous import AsyncDataset, AsyncIterableDataset
    from headrace.dataset.compact import Packed, packed
    from headrace.dataset.rank_info import ShardInfo, shard_info
    from headrace.dataset.stream import Stream
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
    from headrace.fetch.stores.addresses import register_store
    from headrace.formats.arrow.format import Arrow
    from headrace.formats.decoders import register_decoder
    from headrace.formats.limits import Limits
    from headrace.formats.mp4.frames import VideoFrames
    from headrace.formats.parquet.format import Parquet
    from headrace.formats.registry import register_format
    from headrace.loader import DataLoader
    from headrace.ops.mix import mix
    from headrace.ops.registry import BatchOp, OrderOp, SampleOp, register_operator
    from headrace.options import Exclude, FetchOptions
    from headrace.sources.arrays import arrays
    from headrace.sources.clips import Clips
    from headrace.sources.constructors import (
        energon,
        files,
        folder,
        from_iterable,
        from_map,
        stream,
        table,
        text,
    )
    from headrace.sources.hdf5 import hdf5
    from headrace.sources.lerobot import lerobot
    from headrace.sources.reading import read
    from headrace.sources.tokens import tokens
    from headrace.sources.video import video
    from headrace.state.state import merge_states
    from headrace.workers.forkserver.client import shutdown
    from headrace.workers.randomness import rng

_HOMES = {
    "headrace.sources.arrays": ("arrays",),
    "headrace.dataset.asynchronous": ("AsyncDataset", "AsyncIterableDataset"),
    "headrace.sources.constructors": (
        "energon",
        "files",
        "folder",
        "from_iterable",
        "from_map",
        "stream",
        "table",
        "text",
    ),
    "headrace.sources.hdf5": ("hdf5",),
    "headrace.sources.lerobot": ("lerobot",),
    "headrace.ops.mix": ("mix",),
    "headrace.dataset.compact": ("Packed", "packed"),
    "headrace.dataset.rank_info": ("ShardInfo", "shard_info"),
    "headrace.dataset.stream": ("Stream",),
    "headrace.sources.tokens": ("tokens",),
    "headrace.sources.clips": ("Clips",),
    "headrace.sources.video": ("video",),
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
    "headrace.ops.registry": ("BatchOp", "OrderOp", "SampleOp", "register_operator"),
    "headrace.fetch.stores.addresses": ("register_store",),
    "headrace.formats.arrow.format": ("Arrow",),
    "headrace.formats.decoders": ("register_decoder",),
    "headrace.formats.limits": ("Limits",),
    "headrace.formats.mp4.frames": ("VideoFrames",),
    "headrace.formats.parquet.format": ("Parquet",),
    "headrace.formats.registry": ("register_format",),
    "headrace.loader": ("DataLoader",),
    "headrace.options": ("Exclude", "FetchOptions"),
    "headrace.sources.reading": ("read",),
    "headrace.state.state": ("merge_states",),
    "headrace.workers.randomness": ("rng",),
    "headrace.workers.forkserver.client": ("shutdown",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AccessDeniedError",
    "Arrow",
    "AsyncDataset",
    "AsyncIterableDataset",
    "BadResponseError",
    "BatchOp",
    "CannotCarryError",
    "ChecksumError",
    "Clips",
    "CollateError",
    "DataLoader",
    "DecodeError",
    "Exclude",
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
    "OrderOp",
    "Packed",
    "Parquet",
    "ReadTimeoutError",
    "SampleOp",
    "ShardInfo",
    "ShortReadError",
    "StageError",
    "StateMismatchError",
    "StorageError",
    "Stream",
    "ThrottledError",
    "VideoFrames",
    "WorkerDiedError",
    "arrays",
    "energon",
    "files",
    "folder",
    "from_iterable",
    "from_map",
    "hdf5",
    "lerobot",
    "merge_states",
    "mix",
    "packed",
    "read",
    "register_decoder",
    "register_format",
    "register_operator",
    "register_store",
    "rng",
    "shard_info",
    "shutdown",
    "stream",
    "table",
    "text",
    "tokens",
    "video",
]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> object:
    if name == "__version__":
        globals()[name] = _version()
        return globals()[name]
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
