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

from headrace._util import lazy_names

__version__: str  # computed at first use, as it reads files

if TYPE_CHECKING:
    from headrace.dataset.asynchronous import AsyncDataset as AsyncDataset
    from headrace.dataset.asynchronous import AsyncIterableDataset as AsyncIterableDataset
    from headrace.dataset.asynchronous import ShardInfo as ShardInfo
    from headrace.dataset.asynchronous import shard_info as shard_info
    from headrace.dataset.compact import Packed as Packed
    from headrace.dataset.compact import packed as packed
    from headrace.dataset.stream import Stream as Stream
    from headrace.errors import DecodeError as DecodeError
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.errors import OptionError as OptionError
    from headrace.errors import StateMismatchError as StateMismatchError
    from headrace.errors import StorageError as StorageError
    from headrace.formats.arrow import Arrow as Arrow
    from headrace.formats.delimited import Csv as Csv
    from headrace.formats.limits import Limits as Limits
    from headrace.formats.litdata.format import LitData as LitData
    from headrace.formats.mp4.frames import VideoFrames as VideoFrames
    from headrace.formats.parquet.format import Parquet as Parquet
    from headrace.formats.safetensors import SafeTensors as SafeTensors
    from headrace.formats.tfrecord import TFRecord as TFRecord
    from headrace.loader import DataLoader as DataLoader
    from headrace.ops.mix import mix as mix
    from headrace.options import Economic as Economic
    from headrace.options import Exclude as Exclude
    from headrace.options import Fetch as Fetch
    from headrace.options import Ranks as Ranks
    from headrace.options import Skip as Skip
    from headrace.sources.arrays import arrays as arrays
    from headrace.sources.arrays import hdf5 as hdf5
    from headrace.sources.clips import Clips as Clips
    from headrace.sources.clips import video as video
    from headrace.sources.constructors import energon as energon
    from headrace.sources.constructors import stream as stream
    from headrace.sources.constructors import text as text
    from headrace.sources.lerobot import lerobot as lerobot
    from headrace.sources.objects import files as files
    from headrace.sources.objects import folder as folder
    from headrace.sources.objects import table as table
    from headrace.sources.reading import read as read
    from headrace.sources.synchronous import from_iterable as from_iterable
    from headrace.sources.synchronous import from_map as from_map
    from headrace.sources.tokens import tokens as tokens
    from headrace.state.state import merge_states as merge_states
    from headrace.workers.forkserver.client import shutdown as shutdown
    from headrace.workers.randomness import rng as rng

_NAMES = {
    "headrace.dataset.asynchronous": "AsyncDataset AsyncIterableDataset ShardInfo shard_info",
    "headrace.dataset.compact": "Packed packed",
    "headrace.dataset.stream": "Stream",
    "headrace.errors": "DecodeError HeadraceError OptionError StateMismatchError StorageError",
    "headrace.formats.arrow": "Arrow",
    "headrace.formats.delimited": "Csv",
    "headrace.formats.limits": "Limits",
    "headrace.formats.litdata.format": "LitData",
    "headrace.formats.mp4.frames": "VideoFrames",
    "headrace.formats.parquet.format": "Parquet",
    "headrace.formats.safetensors": "SafeTensors",
    "headrace.formats.tfrecord": "TFRecord",
    "headrace.loader": "DataLoader",
    "headrace.ops.mix": "mix",
    "headrace.options": "Economic Exclude Fetch Ranks Skip",
    "headrace.sources.arrays": "arrays hdf5",
    "headrace.sources.clips": "Clips video",
    "headrace.sources.constructors": "energon stream text",
    "headrace.sources.lerobot": "lerobot",
    "headrace.sources.objects": "files folder table",
    "headrace.sources.reading": "read",
    "headrace.sources.synchronous": "from_iterable from_map",
    "headrace.sources.tokens": "tokens",
    "headrace.state.state": "merge_states",
    "headrace.workers.forkserver.client": "shutdown",
    "headrace.workers.randomness": "rng",
}
"""Public names by the module that defines them."""

__all__, _imported = lazy_names(__name__, _NAMES)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> object:
    if name == "FetchOptions":
        raise AttributeError("headrace.FetchOptions is headrace.Fetch")
    if name in ("errors", "plugins"):
        return importlib.import_module(f"headrace.{name}")
    value = globals()[name] = _version() if name == "__version__" else _imported(name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "errors", "plugins", "__version__"]
