"""The loader inside training frameworks that would rebuild it: there its engine is kept.

Lightning, Fabric and torchtitan take a loader as it is. Accelerate's `prepare` makes a loader of torch's class out of
any it is given; `prepare` here does what that does, and keeps headrace's engine.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch.utils.data
from torch.utils.data.dataloader import _DatasetKind

from headrace.errors import LoaderBusyError, OptionError, StateMismatchError, printable
from headrace.loader import DataLoader

log = logging.getLogger("headrace")


def prepare(accelerator: Any, loader: Any) -> Any:
    """What `accelerator.prepare(loader)` gives, with headrace's engine behind it.

    Batches are on the accelerator's device, gradient accumulation sees the end of an epoch, and ranks divide samples:
    for torch's data sets as Accelerate was configured, for headrace's as the loader was. It may be passed to
    `accelerator.prepare` together with the model; that leaves it as it is.

    `accelerator.save_state` saves how far the loop is, and `load_state` goes on from there. What it and `loader` give
    as `state_dict()` is of the batches that the loop was given, though Accelerate has taken one more.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: an `hr.DataLoader`; or a torch loader, or what `accelerator.prepare` or `skip_first_batches` made of
            one, whose engine is replaced.

    Returns:
        A loader of Accelerate's class.

    Raises:
        OptionError: Accelerate was told to use torchdata's StatefulDataLoader, which has its own engine.
    """
    if getattr(accelerator, "use_stateful_dataloader", False):
        raise OptionError("use_stateful_dataloader=True asks Accelerate for torchdata's engine; use one or the other")
    if hasattr(loader, "base_dataloader"):
        return _with_our_engine(loader, loader.base_dataloader)
    if getattr(loader, "regime", "torch") == "torch":
        prepared = _with_our_engine(accelerator.prepare_data_loader(loader), loader)
        if isinstance(loader, DataLoader):
            loader._instead = prepared  # nobody iterates over it any more: its states are those of that one
        return prepared
    prepared = _prepared_batches(accelerator, loader)
    prepared._is_accelerate_prepared = True
    return accelerator.prepare_data_loader(prepared)  # which it only notes, prepared as it is


class TitanState:
    """What torchtitan's checkpoints have of a loader: the two methods that a component of its needs.

    A state that is that of all ranks is there once, and can be gone on from by any number of ranks. Else each rank has
    its own, by its number, for as many ranks as there were.

    Args:
        loader: the component's.
        dp_rank: the rank that torchtitan has given the component.
    """

    def __init__(self, loader: DataLoader[Any], dp_rank: int) -> None:
        self._loader, self._own = loader, f"dp_rank_{dp_rank}"

    def state_dict(self) -> dict[str, str]:
        """The state after what the loop has received, as text by one name."""
        state = self._loader.state_dict()
        is_everybodys = self._loader.regime == "headrace" and "rank" not in state
        return {"all_ranks" if is_everybodys else self._own: json.dumps(state)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from a state; an empty one is the begin.

        Raises:
            StateMismatchError: it is not of this rank, or belongs to other data or another order.
        """
        packed = state.get("all_ranks", state.get(self._own))
        if packed is None and state:
            raise StateMismatchError(
                f"the checkpoint has states of the loaders of {', '.join(sorted(state))}, and none of {self._own}: "
                "where samples are left out on the way each rank has its own, and as many ranks must go on",
                field="world",
            )
        self._loader.load_state_dict({} if packed is None else json.loads(packed))


class _Prepared(Protocol):
    """A loader of Accelerate's; the names are its own."""

    base_dataloader: torch.utils.data.DataLoader[object]
    iteration: object
    use_stateful_dataloader: bool
    _is_accelerate_prepared: bool
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], None]
    _update_state_dict: Callable[[], None]


class Batches(torch.utils.data.IterableDataset[object]):
    """The batches of a loader as an iterable data set of torch's, for frameworks that insist on a loader of their own.

    That loader must not batch again and must have no workers: `batch_size=None, num_workers=0`.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self.loader = loader
        self._is_prepared = False

    def __iter__(self) -> Iterator[object]:
        if not self._is_prepared and _processes_of_accelerate() > 1:
            raise OptionError(
                "Accelerate would divide these batches among processes once more, or have one process read for all, "
                "and samples would be lost: give the loader itself to headrace.frameworks.prepare"
            )
        iterator = iter(self.loader)
        if self._is_prepared:
            self.loader._behind.check_even(self.loader.tail)  # type: ignore[union-attr]
        return iterator

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` begin this epoch.

        Accelerate counts from 0 in each process, and says so before each of its own. Where the loader goes on from a
        state, Accelerate goes on to count from the epoch of that.
        """
        caller = sys._getframe(1)
        shard: Any = caller.f_locals.get("self")
        if not self.loader._behind.goes_on or self.loader.epoch == epoch:
            self.loader.set_epoch(epoch)
        elif hasattr(shard, "iteration"):
            shard.iteration = self.loader.epoch
        begins = caller.f_back
        if begins is not None and begins.f_code.co_name == "__iter__" and begins.f_locals.get("self") is shard:
            self._skip_for(shard)

    def _skip_for(self, shard: Any) -> None:
        """Skip in the loader what Accelerate would take and drop: `skip_first_batches` has said how many batches."""
        skipped = vars(shard).get("_skipped_by_loader", getattr(shard, "skip_batches", 0))
        if not skipped:
            return
        with contextlib.suppress(LoaderBusyError):  # then they are dropped
            self.loader.skip(skipped)
            shard.skip_batches, shard._skipped_by_loader = 0, skipped


def _processes_of_accelerate() -> int:
    module = sys.modules.get("accelerate.state")
    return 1 if module is None else int(module.PartialState._shared_state.get("num_processes", 1))


def _prepared_batches(accelerator: Any, loader: DataLoader[object]) -> _Prepared:
    # As for one process: which samples are this rank's was settled by the loader. A data set of batches, not the
    # loader itself, is put into Accelerate's, as `skip_first_batches` makes a new loader from the data set.
    prepare_data_loader = importlib.import_module("accelerate.data_loader").prepare_data_loader
    source = Batches(loader)
    source._is_prepared = True
    batches: torch.utils.data.DataLoader[object] = torch.utils.data.DataLoader(
        source, batch_size=None, collate_fn=_unchanged
    )
    prepared: _Prepared = prepare_data_loader(
        batches,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
    prepared.state_dict, prepared.load_state_dict = partial(_state_of, loader), partial(_go_on, loader)
    prepared.use_stateful_dataloader = True  # has `save_state` and `load_state` ask it
    return prepared


def _with_our_engine(prepared: _Prepared, source: object) -> _Prepared:
    """The same loader of Accelerate's; the one inside it has its data and order, and the other options of `source`."""
    base = prepared.base_dataloader
    if isinstance(base, DataLoader) or isinstance(base.dataset, Batches):
        return prepared
    options: dict[str, Any] = {
        name: getattr(base, name, getattr(source, name, None))
        for name in inspect.signature(DataLoader).parameters
        if hasattr(base, name) or hasattr(source, name)
    }
    for name in _made_by_torch(base):
        del options[name]
    prepared.base_dataloader = DataLoader(**options)
    prepared._is_accelerate_prepared = True
    place = weakref.ref(prepared)
    base = prepared.base_dataloader
    prepared.state_dict = partial(_state_of_shard, place, base)
    prepared.load_state_dict = partial(_have_shard_go_on, place, base)
    prepared._update_state_dict = _update_nothing  # a state is made when it is asked for
    prepared.use_stateful_dataloader = True
    return prepared


def _state_of_shard(place: weakref.ref[_Prepared], base: DataLoader[object]) -> dict[str, object]:
    prepared = place()
    if prepared is None:  # nobody has kept it: it goes before the call of its method, which is no bound one
        return _state_of(base)
    if _processes_of_accelerate() > 1 and type(prepared).__name__ == "DataLoaderDispatcher":
        return _no_state("one process reads for all, by dispatch_batches, and the others know nothing of its place")
    state = _state_of(base)
    return {**state, "iteration": base._holder.next_epoch(prepared.iteration)}


def _have_shard_go_on(place: weakref.ref[_Prepared], base: DataLoader[object], state: Mapping[str, object]) -> None:
    _go_on(base, {name: value for name, value in state.items() if name != "iteration"})
    prepared = place()
    if prepared is not None:
        prepared.iteration = state.get("iteration", prepared.iteration)  # it tells samplers, when it begins an epoch


def _state_of(loader: DataLoader[object]) -> dict[str, object]:
    """The loader's state; or why there is none, so that the rest of a run can be saved."""
    try:
        return loader.state_dict()
    except OptionError as error:
        return _no_state(str(error))


def _no_state(why: str) -> dict[str, object]:
    log.warning("the loader's place in its data is not saved: %s", printable(why))
    return {"no_state": why}


def _go_on(loader: DataLoader[object], state: Mapping[str, object]) -> None:
    if "no_state" in state:
        log.warning("the loader begins an epoch anew: %s", printable(str(state["no_state"])))
    else:
        loader.load_state_dict(state)


def _update_nothing() -> None:
    pass


def _made_by_torch(loader: torch.utils.data.DataLoader[object]) -> tuple[str, ...]:
    """Attributes that follow from others, and are refused beside those."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "sampler", "batch_sampler"
    return ("batch_sampler",) if loader.batch_sampler is None else ("sampler", "batch_size", "drop_last")


def _unchanged(batch: object) -> object:
    return batch
