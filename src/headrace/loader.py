"""The DataLoader: torch's constructor; behind it torch's semantics or headrace's promises, as the data set says."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.data

from headrace import resolve
from headrace.datasets.base import Operators
from headrace.datasets.stream import Stream
from headrace.deliver.loops import Closing, asyncio_loop
from headrace.drop_in.in_thread import InThread
from headrace.drop_in.regime import Torch
from headrace.drop_in.torch_loader import T_co, TorchLoader
from headrace.functions import as_it_is
from headrace.holding import Holder, goes_on_from, holder_of
from headrace.left_out import MAX_SKIPS
from headrace.observe.report import Reports
from headrace.observe.stats import Stats
from headrace.options import Balance, Exclude, FetchOptions
from headrace.streaming.regime import Position, Streaming
from headrace.torch_compat.plan_sampler import PlanSampler, order_of
from headrace.torch_compat.ranks import Ranks, find_ranks
from headrace.torch_compat.stateful import Stateful
from headrace.types import Tail
from headrace.work.executor import Executor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LONGEST_DATA_TEXT = 200


class DataLoader(TorchLoader[T_co], Closing, Reports):
    """Batches of a data set, for `for` and for `async for`.

    It takes torch's arguments by torch's names. What happens behind it follows from the data set: torch's own, and all
    that have only `__getitem__`, behave as with torch's DataLoader (regime "torch"); streams, AsyncDatasets and
    AsyncIterableDatasets keep headrace's promises (regime "headrace").

    In the torch regime base seed, indices and workers' seeds are torch's, and batch k is worker k mod n's. Workers are
    an iterator's own, and come out of a clean process: the data set and functions travel to them, lambdas and local
    classes too, and large arrays lie once in shared memory for all. With `economic=True` workers are the loader's, all
    of them make the samples of one batch at a time, and each sample's random numbers depend on (seed, epoch, key).

    In the headrace regime batches come in the order of the plan, which depends on (seed, epoch) alone; each sample
    comes once; and workers, reads in flight and memory have bounds of their own. Workers, connections and memory are
    the loader's, from its first iteration until `close()`, or until it is collected.

    Args:
        dataset: the data.
        batch_size: samples in a batch; None gives single samples. Leave it out where the stream makes batches itself,
            as `.padded_batch()` and `.bucket()` do.
        shuffle: the same as `.shuffle()` on the data set.
        num_workers: worker processes for plain functions and collation; 0: a thread of this process.
        collate_fn: makes a batch of a list of samples; by default torch's default_collate.
        pin_memory: copy batches into page-locked memory, where there is an accelerator.
        drop_last: leave a short last batch out.
        timeout: seconds that `next` waits for a batch at most; 0: for ever.
        worker_init_fn: called in each worker process with its number.
        generator: gives the seed, by one draw.
        multiprocessing_context: starts workers from the trainer's process, as torch's loader does; torch regime only.
        prefetch_factor: batches made ahead. Torch regime: by each worker, by default 2; with `economic` by all workers
            together. Otherwise by all workers together: by default 4, or 2 for each worker where a worker makes whole
            batches (a collate_fn of your own); 0: nothing is made before it is asked for. With `batch_size=None` it
            counts samples; by default they come some together, by bytes and by the time that they take.
        persistent_workers: workers, and their copies of the data set, stay for further epochs. With headrace's data
            sets they always do.
        in_order: False gives batches as they become ready.
        seed: of the order and of the samples' random numbers; None means 0.
        shard: ranks of a distributed run get different samples of each global batch; False gives every rank all.
            Data sets of ours only, as all of the next seven.
        global_batch_size: samples of a batch of all ranks together, in the place of `batch_size`; ranks differ by at
            most one.
        tail: what becomes of a last global batch that is short. "short" gives it, and every sample comes once: where
            ranks would have none, the last two share what is left. "drop" leaves it out, as `drop_last`. "pad" fills
            it with samples of the epoch's begin, which come twice. "carry" puts it at the begin of the next epoch.
            "uneven" lets each rank end with its own data: every sample comes once, also behind filters, and ranks may
            make different numbers of steps.
        rank: which part of each global batch is this process's, with `world_size`. By default they follow from
            `device_mesh`, from torch.distributed, or from the environment, when the loader is first iterated over.
        world_size: how many parts there are.
        device_mesh: a DeviceMesh; only its dimensions that divide data count.
        data_dims: the names of these.
        ranks: "all": when an epoch begins, ranks compare their plans. "local": they do not, for loops that not all
            ranks run.
        snapshot_every_n_steps: data sets of torch's only: after how many of its batches each worker tells its state;
            what came since is made again by who goes on. 0: never. None: 1, as soon as somebody has called
            `state_dict` or `load_state_dict`. With `in_order=False` a map-style data set with a state has it told
            after each batch, whatever the number.
        fetch_concurrency: reads under way at once; "auto" begins with 128, and doubles them up to 1,024 as long as that
            brings a third more per second.
        memory_budget: bytes, or text such as "2GiB", for inputs and batches together; "auto" is a quarter of the
            memory that this process may use.
        fetch: how reads are made.
        on_error: "raise" gives the error of the first sample that failed in the place of its batch; "skip" leaves
            samples that failed out of their batches; a function is called with each one's exception, in the engine's
            thread, and says True for those that are left out. Other data sets than torch's only.
        max_skips: how many samples may be left out in an epoch, or (in all, in a row), None being any number; the
            next one's error is raised. Samples that one failed read was for count as one.
        balance: deals the samples of each global batch to ranks so that their work is even: "tokens", "tokens^2" (what
            attention within documents takes), or a function that gives an array of work for one of samples' numbers.
            Each rank has as many samples as ever, and the global batches are the same ones. By tokens: for `.pack()`,
            and token files with documents.
        exclude: samples, and steps, that are left out and never read, as after a loss spike: `hr.Exclude(…)`, or a file
            that `quarantine` has written. Data sets whose samples have numbers only.
        quarantine: a file to which each sample that `on_error` leaves out is added, a line of JSON with its number,
            its name and why. Several processes may write to one.
        workers: "process"; "thread", for functions that release the GIL (global generators are the trainer's there);
            or, for data sets of ours, an executor that starts them.
        economic: the mode of the RFC "DataLoader-Economic": memory follows `prefetch_factor` and not the number of
            workers. For map-style data sets of torch's.
        num_batch_workers: how many batches may be collated at once in economic mode; None: `prefetch_factor`.
        num_workers_batches: the same by the RFC's name.
        device: where batches are to be: they are copied there ahead, from page-locked memory.

    Raises:
        OptionError: an option of ours has a value that cannot be used.
        ValueError, TypeError: torch's own checks of torch's own options.
        CannotCarryError: the data set or a function holds what cannot be sent to another process, and workers are not
            forked from this one (when iterated over).

    Examples:
        >>> import headrace as hr
        >>> class Squares(hr.AsyncDataset):
        ...     def __len__(self):
        ...         return 5
        ...     async def aget(self, index):
        ...         return index * index
        >>> with hr.DataLoader(Squares(), batch_size=2) as loader:
        ...     [batch.tolist() for batch in loader]
        [[0, 1], [4, 9], [16]]
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
        shard: bool = True,
        global_batch_size: int | None = None,
        tail: Tail | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        data_dims: Sequence[str] | None = None,
        ranks: Literal["all", "local"] = "all",
        snapshot_every_n_steps: int | None = None,
        fetch_concurrency: int | Literal["auto"] = "auto",
        memory_budget: int | str = "auto",
        fetch: FetchOptions | None = None,
        on_error: Literal["raise", "skip"] | Callable[[BaseException], object] = "raise",
        max_skips: int | tuple[int | None, int | None] | None = MAX_SKIPS,
        balance: Balance | None = None,
        exclude: Exclude | str | os.PathLike[str] | None = None,
        quarantine: str | os.PathLike[str] | None = None,
        workers: Literal["process", "thread"] | Executor = "process",
        economic: bool = False,
        num_batch_workers: int | None = None,
        num_workers_batches: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        # Every argument is an attribute by its name: frameworks make a loader anew from these.
        self.seed, self.shard, self.fetch_concurrency = seed, shard, fetch_concurrency
        self.memory_budget, self.fetch, self.workers, self.device = memory_budget, fetch, workers, device
        self.on_error, self.max_skips, self.exclude, self.quarantine = on_error, max_skips, exclude, quarantine
        self.balance = balance
        self.economic, self.num_batch_workers = economic, num_batch_workers
        self.num_workers_batches = num_workers_batches
        self.global_batch_size, self.tail, self.rank, self.world_size = global_batch_size, tail, rank, world_size
        self.device_mesh, self.data_dims, self.ranks = device_mesh, data_dims, ranks
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._holder = Holder()
        self._instead: Stateful | None = None  # a loader of Accelerate's that is iterated over
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
        find = partial(
            find_ranks, rank=rank, world_size=world_size, device_mesh=device_mesh, data_dims=data_dims, ranks=ranks
        )
        name = f"enumerate(DataLoader)#{type(self).__name__}.__next__"
        resolved, is_whole = resolve.resolve(self, stream.pipeline()), stream.pipeline().delivering.is_everywhere
        ranks_of = find if shard and not is_whole else Ranks
        self._behind = Streaming(dataset, stream, resolved, workers=workers, ranks=ranks_of, name=name)

    def __repr__(self) -> str:
        data = getattr(self, "dataset", None)
        text = repr(data) if isinstance(data, Stream) else f"{type(data).__name__}(…)"  # others' may have many lines
        if len(text) > _LONGEST_DATA_TEXT:
            text = f"{text[:_LONGEST_DATA_TEXT]}…"
        regime = "economic" if getattr(self, "economic", False) else getattr(self, "regime", None)
        options = {name: getattr(self, name, None) for name in ("batch_size", "num_workers")} | {"regime": regime}
        return f"{type(self).__name__}({text}, {', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        self._holder = holder_of()
        if self._holder.epoch is not None and not self._behind.goes_on:
            self.set_epoch(self._holder.epoch)
        kept: Any = self._iterator
        if kept is not None and kept.is_over:  # its workers were closed
            self._iterator = None
        return super().__iter__() if self.regime == "torch" else self._behind.iterate(self, None)

    def __aiter__(self) -> AsyncIterator[T_co]:
        self._holder = Holder()
        if self.regime == "torch" and self.num_workers == 0:
            return InThread(self.__iter__)
        iterator: Any = iter(self) if self.regime == "torch" else self._behind.iterate(self, asyncio_loop())
        return aiter(iterator)

    def _get_iterator(self) -> Any:
        """The seam of torch's own class: what `iter` gives, unless persistent workers have one already."""
        if self.num_workers:
            self.check_worker_number_rationality()
        return self._behind.iterate(self, None)

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        return self._behind.length() if isinstance(self._behind, Streaming) else super().__len__()

    def __bool__(self) -> bool:
        """False if it is known that an epoch has no batches."""
        try:
            return len(self) > 0
        except TypeError:
            return True

    def __getstate__(self) -> dict[str, Any]:
        if self.regime == "headrace":
            raise TypeError("a loader of headrace's data sets cannot be pickled; send the data set, and make a loader")
        return {name: value for name, value in vars(self).items() if name not in ("_behind", "_iterator", *_OWN)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _iterator=None, _holder=Holder(), _instead=None)
        self._behind = Torch(self)

    @property
    def options(self) -> dict[str, Any]:
        """What every "auto" has become."""
        return self._behind.options

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iter` begins.

        It advances with an epoch's last batch; where `len` is not known, when one more is asked for. If a loop stops
        after some batches, it advances with the next `iter`, which begins another epoch, as under torch. It does not if
        `set_epoch` was called, nor if a state of that epoch is loaded.
        """
        return self._behind.epoch

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` begin this epoch; samplers of torch's that know epochs are told."""
        if self._behind.goes_on and epoch != self.epoch and goes_on_from(self.epoch):
            return
        if self._holder.epoch is None or not self._behind.is_in(epoch):  # else it says which one it has begun
            self._behind.set_epoch(epoch)

    @property
    def position(self) -> Position:
        """How far the trainer is in the epoch: (batch, samples, global_samples); other data sets than torch's only."""
        return self._behind.position

    def skip(self, batches: int) -> None:
        """Have the next `iter` begin so many batches further on; nothing is read of those that have numbers.

        Raises:
            LoaderBusyError: an iterator is in use.
            OptionError: the data set is torch's.
        """
        self._behind.skip(batches)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """What is needed to go on exactly after what the trainer has received, as JSON; from any thread.

        Inside the loop behind the last batch: the epoch that goes on from it is empty, and the next one whole. Once the
        loop is over: the next epoch is whole. Loops of Lightning and Accelerate are known: what these have taken ahead
        is still to come, and behind the last batch of an epoch they go on with the next one.

        Args:
            batches: the state after so many batches of this epoch, for loops that take one batch ahead; the last 16
                are known, and with data sets of torch's the last 3.

        Raises:
            OptionError: there is no state, and why.
        """
        if self._instead is not None and batches is None:
            return self._instead.state_dict()
        return self._behind.state_dict(self, batches, self._holder)

    def load_state_dict(self, state: Mapping[str, Any], force: bool = False) -> None:
        """Have the next `iter` go on from a state, also with other workers, batch sizes and numbers of ranks.

        Of data sets of torch's, the number of workers must be the same, as each has a data set with a state of its own.

        Args:
            state: what `state_dict` gave; an empty one is the begin.
            force: go on also where the data or the order are others.

        Raises:
            StateMismatchError: the state belongs to other data or another order; it names what differs.
            LoaderBusyError: an iterator is in use; of data sets of torch's it is dropped.
        """
        if self._instead is not None:
            self._instead.load_state_dict(state)
            return
        self._behind.load_state_dict(self, state, force)
        self._holder = Holder()

    def peek(self) -> T_co:
        """The first batch that `iter` would give now, which it gives again: nothing is consumed."""
        batch: T_co = self._behind.peek()
        return batch

    def stats(self) -> Stats:
        """A snapshot of what the loader has done so far, stage by stage."""
        return self._behind.stats()

    def close(self) -> None:
        """End all iterators, workers and reads; batches stay valid."""
        self._iterator = None
        self._behind.close()


def single_samples(stream: Stream, **options: Any) -> DataLoader[Any]:
    """What iterates over a stream by itself: its samples, one by one, as they are; its batches as it says."""
    group = stream.pipeline().group
    collate = as_it_is if group is None else None
    return DataLoader(stream, batch_size=None, collate_fn=collate, **options)


_OWN = ("_holder", "_instead")  # what a copy has of its own
