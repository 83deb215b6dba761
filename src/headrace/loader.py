"""The DataLoader: torch's constructor for torch's and headrace's data sets."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
import torch.utils.data

from headrace._util.functions import as_it_is
from headrace.dataset.operators import Operators
from headrace.dataset.stream import Stream
from headrace.delivery.loop_lookahead import Closing, TrainingLoop, asyncio_loop, find_training_loop, sync_fabric_epoch
from headrace.observe import Reports, Stats
from headrace.options import Economic, Exclude, Fetch, Ranks, Skip
from headrace.session import resolve
from headrace.session.session import Position, Streaming
from headrace.torch_compat.ranks import find_ranks
from headrace.torch_compat.torch_loader import PlanSampler, T_co, TorchLoader, order_of

if TYPE_CHECKING:
    from headrace.torch_compat.stateful import Stateful
    from headrace.torch_regime.regime import Torch
    from headrace.workers.executor import Executor

_LONGEST_DATA_TEXT = 200


class DataLoader(TorchLoader[T_co], Closing, Reports):
    """Batches of a data set, for `for` and for `async for`.

    The data set decides the regime. torch's data sets, and objects with only `__getitem__`, behave as with torch's
    DataLoader (regime "torch"): seeds and indices are equal, and worker k mod n makes batch k. Streams, AsyncDatasets
    and AsyncIterableDatasets (regime "headrace") give each sample once, in an order that depends on (seed, epoch) only.
    Their workers, connections and memory belong to the loader, from the first iteration until `close()`.

    Args:
        dataset: The data set.
        batch_size: Samples per batch. None gives single samples. Omit it if the stream makes batches itself.
        shuffle: In regime "headrace" the same as `.shuffle()` on the data set.
        sampler: For torch's data sets, as in torch. Others have operators: `.shuffle()`, `.sample()`.
        batch_sampler: For torch's data sets, as in torch.
        num_workers: Worker processes for plain functions and collation. 0: a thread of this process.
        collate_fn: Makes a batch from a list of samples. Default: torch's default_collate.
        pin_memory: Copy batches into page-locked memory if there is an accelerator.
        drop_last: Drop a short last batch.
        timeout: Maximum number of seconds that `next` waits for a batch. 0: no limit.
        worker_init_fn: Called in each worker process with the worker's number.
        multiprocessing_context: For torch's data sets, as in torch.
        generator: As in torch. For headrace's data sets it draws the seed.
        prefetch_factor: Batches made ahead: by each worker (torch, default 2), or by all together (economic or
            headrace, default 4). 0: none is made before it is requested.
        persistent_workers: As in torch. Always on for headrace's data sets.
        pin_memory_device: As in torch.
        in_order: False gives batches as they become ready.
        seed: Seed of the order and of the samples' random numbers. None means 0.
        ranks: `hr.Ranks(…)`: how ranks divide each global batch. None: by torch.distributed or the environment.
            `hr.Ranks.none`: every rank gets all samples. For headrace's data sets.
        errors: None raises the error of the first failed sample in place of its batch. `hr.Skip(…)` skips failed
            samples. For headrace's data sets.
        exclude: Samples and steps that are never read: `hr.Exclude(…)`, or a file that `hr.Skip(log=)` has written.
        fetch: Options of reads: `hr.Fetch(…)`. For headrace's data sets.
        memory_budget: Bytes, or text such as "2GiB", for inputs and batches together. "auto": a quarter of the memory.
        workers: "process"; "thread", for functions that release the GIL; or an executor (headrace's data sets only).
        device: Device that batches are copied to ahead of use, from page-locked memory.
        economic: True, or `hr.Economic(…)`: memory depends on `prefetch_factor` and not on the number of workers. For
            torch's map-style data sets.
        snapshot_every_n_steps: As in torchdata: batches between states of a worker's data set. For torch's data sets.
        **aliases: The RFC's names `num_batch_workers` and `num_workers_batches`, with `economic=True`.

    Raises:
        OptionError: a headrace option has a value that cannot be used.
        ValueError, TypeError: checks of options by torch.
        CannotCarryError: by `iter`: the data set or a function cannot be sent to another process.

    Examples:
        >>> with hr.DataLoader(hr.from_map(range(5)), batch_size=2) as loader:
        ...     [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        ranks: Ranks | None = None,
        errors: Skip | None = None,
        exclude: Exclude | str | os.PathLike[str] | None = None,
        fetch: Fetch | None = None,
        memory_budget: int | str = "auto",
        workers: Literal["process", "thread"] | Executor = "process",
        device: torch.device | str | int | None = None,
        economic: bool | Economic = False,
        snapshot_every_n_steps: int | None = None,
        **aliases: Unpack[resolve.Aliases],
    ) -> None:
        economic = resolve.economy(economic, aliases)
        # Every argument is an attribute of the same name: frameworks rebuild a loader from these.
        self.seed, self.ranks, self.errors, self.exclude, self.fetch = seed, ranks, errors, exclude, fetch
        self.memory_budget, self.workers, self.device, self.economic = memory_budget, workers, device, economic
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._loop = TrainingLoop()
        self._instead: Stateful | None = None  # a loader of Accelerate that is iterated over instead
        self.regime: Literal["torch", "headrace"] = "headrace" if isinstance(dataset, Operators) else "torch"
        common: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "generator": generator,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
            "persistent_workers": persistent_workers,
        }
        resolve.check_workers(workers, num_workers, collate_fn)
        if self.regime == "torch":
            super().__init__(
                dataset,
                batch_size,
                shuffle,
                sampler,
                batch_sampler,
                drop_last=drop_last,
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                **common,
            )
            from headrace.torch_regime.regime import Torch

            resolve.check_torch(self)
            self._behind: Torch | Streaming = Torch(self)
            return
        resolve.check_ours(
            self,
            type(dataset).__name__,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
        )
        if sampler is not None or batch_sampler is not None:
            order = order_of(dataset, sampler, batch_sampler)
            shuffle = order.shuffle
            batch_size = order.batch_size or batch_size
            drop_last = drop_last if order.drop_last is None else order.drop_last
        super().__init__(
            dataset, batch_size, sampler=PlanSampler(dataset, bool(shuffle), self), drop_last=drop_last, **common
        )
        if seed is None and generator is not None:
            self.seed = seed = int(torch.randint(2**63 - 1, (), generator=generator).item())
        stream = dataset if isinstance(dataset, Stream) else Stream(dataset)
        if shuffle:
            stream = stream.shuffle()
        if drop_last:
            stream = stream.without_short_batches()
        self.prefetch_factor = prefetch_factor
        name = f"enumerate(DataLoader)#{type(self).__name__}.__next__"
        resolved, is_whole = resolve.resolve(self, stream.pipeline()), stream.pipeline().is_everywhere
        find = partial(find_ranks, Ranks.none if is_whole else ranks or Ranks())
        self._behind = Streaming(dataset, stream, resolved, workers=workers, ranks=find, name=name)

    def __repr__(self) -> str:
        data = getattr(self, "dataset", None)
        text = repr(data) if isinstance(data, Stream) else f"{type(data).__name__}(…)"  # other reprs may be long
        if len(text) > _LONGEST_DATA_TEXT:
            text = f"{text[:_LONGEST_DATA_TEXT]}…"
        regime = "economic" if getattr(self, "economic", False) else getattr(self, "regime", None)
        options = {name: getattr(self, name, None) for name in ("batch_size", "num_workers")} | {"regime": regime}
        return f"{type(self).__name__}({text}, {', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        self._loop = find_training_loop()
        if self._loop.epoch is not None and not self._behind.goes_on:
            self.set_epoch(self._loop.epoch)
        kept: Any = self._iterator
        if kept is not None and kept.is_over:  # the workers were closed
            self._iterator = None
        return super().__iter__() if self.regime == "torch" else self._behind.iterate(self, None)

    def __aiter__(self) -> AsyncIterator[T_co]:
        self._loop = TrainingLoop()
        if self.regime == "torch" and self.num_workers == 0:
            from headrace.torch_regime.inline_iterator import InThread

            return InThread(self.__iter__)
        iterator: Any = iter(self) if self.regime == "torch" else self._behind.iterate(self, asyncio_loop())
        return aiter(iterator)

    def _get_iterator(self) -> Any:
        if self.num_workers:
            self.check_worker_number_rationality()
        return self._behind.iterate(self, None)

    def __len__(self) -> int:
        """Number of batches in an epoch. TypeError if it is not known before the epoch ends."""
        return self._behind.length() if isinstance(self._behind, Streaming) else super().__len__()

    def __bool__(self) -> bool:
        """False if an epoch is known to have no batches."""
        try:
            return len(self) > 0
        except TypeError:
            return True

    def __getstate__(self) -> dict[str, Any]:
        if self.regime == "headrace":
            raise TypeError("a loader of headrace's data sets cannot be pickled; send the data set, and make a loader")
        return {name: value for name, value in vars(self).items() if name not in ("_behind", "_iterator", *_OWN)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from headrace.torch_regime.regime import Torch

        vars(self).update(state, _iterator=None, _loop=TrainingLoop(), _instead=None)
        self._behind = Torch(self)

    @property
    def options(self) -> dict[str, Any]:
        """All options with every "auto" resolved."""
        return self._behind.options

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next `iter` starts. Advances with the last batch of an epoch."""
        return self._behind.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter` start this epoch. torch's samplers that have `set_epoch` get the number too."""
        if self._behind.goes_on and epoch != self.epoch and sync_fabric_epoch(self.epoch):
            return
        if self._loop.epoch is None or not self._behind.is_in(epoch):  # else the loop has set it
            self._behind.set_epoch(epoch)

    @property
    def position(self) -> Position:
        """Progress in the epoch: (batch, samples, global_samples). Not for torch's data sets."""
        return self._behind.position

    def skip(self, batches: int) -> None:
        """Make the next `iter` start `batches` batches later. Not for torch's data sets.

        Raises:
            LoaderBusyError: an iterator is in use.
        """
        self._behind.skip(batches)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return a JSON state to resume exactly after the batches that the trainer has received. From any thread.

        Args:
            batches: Return the state after this number of batches of the epoch: one of the last 16, or 3 with torch's
                data sets. For loops that take one batch ahead.

        Raises:
            OptionError: there is no state; the message gives the reason.
        """
        if self._instead is not None and batches is None:
            return self._instead.state_dict()
        return self._behind.state_dict(self, batches, self._loop)

    def load_state_dict(self, state: Mapping[str, Any], force: bool = False) -> None:
        """Make the next `iter` resume from a state. An empty state is the start.

        Workers, batch sizes and ranks may differ, except with torch's data sets.

        Args:
            force: Resume even if the data or the order differ.

        Raises:
            StateMismatchError: the state belongs to other data or another order; the message names the difference.
            LoaderBusyError: an iterator is in use. With torch's data sets it is dropped instead.
        """
        if self._instead is not None:
            self._instead.load_state_dict(state)
            return
        self._behind.load_state_dict(self, state, force)
        self._loop = TrainingLoop()

    def peek(self) -> T_co:
        """Return the first batch of the next `iter` without consuming it."""
        batch: T_co = self._behind.peek()
        return batch

    def stats(self) -> Stats:
        """Return a snapshot of the loader's counters, by stage."""
        return self._behind.stats()

    def close(self) -> None:
        """End all iterators, workers and reads. Batches stay valid."""
        self._iterator = None
        self._behind.close()


def single_samples(stream: Stream) -> DataLoader[Any]:
    """Return a loader over the samples of a stream, or over the batches that the stream makes."""
    group = stream.pipeline().group
    collate = as_it_is if group is None else None
    return DataLoader(stream, batch_size=None, collate_fn=collate)


_OWN = ("_loop", "_instead")  # not copied by pickle
