"""Training loops that prefetch batches: how many they hold when a state is requested."""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
import weakref
from collections.abc import Sized
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self

import anyio
import anyio.to_thread


class TaskLock:
    """A lock for the tasks of the running event loop.

    Each loop gets a new lock. A task that held the old one when its loop ended never releases it, and trio cannot use a
    lock of asyncio.
    """

    def __init__(self) -> None:
        self._loop: object = None
        self._lock: anyio.Lock | None = None

    @property
    def here(self) -> anyio.Lock:
        loop = running_loop()
        if self._lock is None or self._loop is not loop:
            self._loop, self._lock = loop, anyio.Lock()
        return self._lock


def running_loop() -> object:
    """Return the event loop of the current task: asyncio's loop, or trio's token."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from trio.lowlevel import current_trio_token

        return current_trio_token()


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Closing:
    """Mixin: an object that `with` and `async with` close."""

    def close(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class PrefetchedBatches(NamedTuple):
    """Batches taken by a loop and not yet trained on.

    Attributes:
        is_over: True if the loop has trained on the last batch of its epoch, so that a resumed run starts the next
            epoch.
    """

    batches: int = 0
    is_over: bool = False


class TrainingLoop:
    """A loop that trains on each batch before it takes the next one.

    Attributes:
        epoch: The epoch that the loop starts, if it calls `set_epoch` only after `iter`.
    """

    epoch: int | None = None

    def prefetched(self, *, knows_end: bool) -> PrefetchedBatches:
        """Return the batches that the loop holds. `knows_end`: it has reached the epoch's end."""
        return PrefetchedBatches()

    def next_epoch(self, counted: object) -> object:
        """Return the epoch of a resumed run, as Accelerate counts. `counted` is its current count."""
        return counted


class UnknownLoop(TrainingLoop):
    """A loop of a prefetching framework, in a release for which `prefetched` is not known."""

    def __init__(self, framework: str) -> None:
        self._framework, self._has_warned = framework, False

    def prefetched(self, *, knows_end: bool) -> PrefetchedBatches:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._framework} iterates over this loader in a way that is not known here. If it takes batches "
                "before it trains on them, this state counts them as trained on, and a run that resumes from it "
                "never gets them: ask for state_dict(batches=n), n being how many batches of the epoch were trained on",
                RuntimeWarning,
                stacklevel=2,
            )
        return super().prefetched(knows_end=knows_end)


class _Fetcher(Protocol):
    """Lightning's fetcher. If it prefetches, it also has `batches` and `prefetch_batches`."""

    iterator: object
    done: bool


class _Shard(Protocol):
    iteration: int
    end_of_dataloader: bool


class LightningLoop(TrainingLoop):
    """Lightning's loop. It prefetches one batch from loaders without a length."""

    def __init__(self, fetcher: _Fetcher, loaders: Sized, *, epoch: int | None) -> None:
        self.epoch = epoch
        self._fetcher = weakref.ref(fetcher)
        self._ahead = 0 if _is_counted(loaders) else getattr(fetcher, "prefetch_batches", 0)

    @staticmethod
    def is_known(fetcher: object, loaders: object) -> bool:
        """True if the objects have the attributes of the supported releases."""
        has_batches = hasattr(fetcher, "batches") or not hasattr(fetcher, "prefetch_batches")
        return loaders is not None and has_batches and hasattr(fetcher, "iterator") and hasattr(fetcher, "done")

    def prefetched(self, *, knows_end: bool) -> PrefetchedBatches:
        fetcher = self._fetcher()
        if fetcher is None or fetcher.iterator is None:  # the loop has ended and dropped its batches
            return PrefetchedBatches(0 if knows_end else self._ahead, knows_end)
        return PrefetchedBatches(len(getattr(fetcher, "batches", ())), bool(fetcher.done))


class AccelerateLoop(TrainingLoop):
    """Loop over a loader prepared by Accelerate. It prefetches one batch, except after the last."""

    def __init__(self, shard: _Shard) -> None:
        self._shard = weakref.ref(shard)
        self.begun = int(shard.iteration)

    def prefetched(self, *, knows_end: bool) -> PrefetchedBatches:
        shard = self._shard()
        is_last = knows_end if shard is None else bool(shard.end_of_dataloader)
        return PrefetchedBatches(0 if is_last else 1, is_last and knows_end)

    @staticmethod
    def is_known(shard: object) -> bool:
        """True if the object has the attributes of the supported releases."""
        return hasattr(shard, "iteration") and hasattr(shard, "end_of_dataloader")

    def next_epoch(self, counted: object) -> object:
        del counted
        shard = self._shard()
        return self.begun + (shard is not None and bool(shard.end_of_dataloader))


def find_training_loop() -> TrainingLoop:
    """Return the loop that requests an iterator now, found on the call stack."""
    framework = _framework()
    fetchers = _known("loops.fetchers", "_DataFetcher")
    shards = _known("data_loader", "DataLoaderShard") + _known("data_loader", "DataLoaderDispatcher")
    together = _known("utilities.combined_loader", "_ModeIterator")
    others = _known("loops.evaluation_loop", "_EvaluationLoop") + _known("loops.prediction_loop", "_PredictionLoop")
    frame = sys._getframe(1) if fetchers or shards else None
    fetcher: Any = None
    loaders: Any = None
    for _ in range(_FRAMES_MOST):
        if frame is None:
            break
        found: Any = frame.f_locals.get("self")
        if isinstance(found, fetchers):
            fetcher = found
        elif isinstance(found, together):
            loaders = found
        elif fetcher is not None and (
            hasattr(found, "epoch_progress") or isinstance(found, others)
        ):  # the loop that owns the fetcher
            progress = getattr(found, "epoch_progress", None)  # training loops only
            epoch = None if progress is None else int(progress.current.processed)
            is_known = LightningLoop.is_known(fetcher, loaders)
            return LightningLoop(fetcher, loaders, epoch=epoch) if is_known else UnknownLoop("lightning.pytorch")
        elif issubclass(type(found), shards):  # isinstance fails: it overrides `__class__`
            return AccelerateLoop(found) if AccelerateLoop.is_known(found) else UnknownLoop("accelerate")
        frame = frame.f_back
    return TrainingLoop() if framework is None else UnknownLoop(framework)


def sync_fabric_epoch(epoch: int) -> bool:
    """Make Fabric count epochs from `epoch`, if Fabric calls `set_epoch` now. Return True if so.

    Fabric counts the loops over a loader, from 0 in each process.
    """
    counters = _known("wrappers", "_FabricDataLoader", _FABRIC)
    frame: FrameType | None = sys._getframe(1)
    tells: FrameType | None = None  # the caller of `set_epoch`
    for _ in range(_FRAMES_TELLING):
        if frame is None:
            break
        found = frame.f_locals.get("self")
        if isinstance(found, counters) and hasattr(found, "_num_iter_calls"):
            found._num_iter_calls = epoch
            return True
        tells = frame if tells is None and not _is_ours(frame) else tells
        frame = frame.f_back
    if tells is not None and str(tells.f_globals.get("__name__")).startswith(_FABRIC):
        warnings.warn(
            f"Fabric counts epochs in a way that is not known here, and has started another one than epoch {epoch}, in "
            f"which the loaded state resumes: that state is ignored. Iterate over the loader itself, not over "
            "what `setup_dataloaders` gives",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


def _framework() -> str | None:
    """Return the prefetching framework that iterates over the loader, also through iterators."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_ours(frame) or _is_of_an_iterator(frame)):
        frame = frame.f_back
    return None if frame is None else _package(frame)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("headrace", "torch")


def _is_of_an_iterator(frame: FrameType) -> bool:
    """True if the frame passes items on to its caller, and is not a framework's."""
    return _package(frame) is None and (
        frame.f_code.co_name in ("__iter__", "__next__") or bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    )


def _package(frame: FrameType) -> str | None:
    name = f"{frame.f_globals.get('__name__')}."
    return next((package for package in _FRAMEWORKS if name.startswith(f"{package}.")), None)


def _known(module: str, name: str, packages: tuple[str, ...] | None = None) -> tuple[type, ...]:
    """Return the classes of this name in those frameworks that are imported."""
    places = (sys.modules.get(f"{package}.{module}") for package in packages or _FRAMEWORKS)
    return tuple(getattr(place, name) for place in places if hasattr(place, name))


def _is_counted(loader: Sized) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


_FRAMEWORKS = ("lightning.pytorch", "pytorch_lightning", "accelerate")
_FABRIC = ("lightning.fabric", "lightning_fabric")  # takes no batch ahead
_FRAMES_MOST = 16
_FRAMES_TELLING = 5
