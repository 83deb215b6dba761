"""Support for training frameworks that would rebuild the loader with another engine.

Lightning, Fabric and torchtitan use a loader as it is. Accelerate's `prepare` makes a plain torch loader of any
loader. `prepare` of this module does the same and keeps headrace's engine.
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

from headrace._util import check
from headrace._util.functions import as_it_is
from headrace.errors import LoaderBusyError, OptionError, StateMismatchError, printable
from headrace.loader import DataLoader

log = logging.getLogger("headrace")


def prepare(accelerator: Any, loader: Any) -> Any:
    """Return the loader that `accelerator.prepare(loader)` would return, with headrace's engine.

    Batches are on the accelerator's device, gradient accumulation sees the end of an epoch, and ranks share the
    samples. For torch's data sets Accelerate's configuration decides how, for headrace's the loader's options. The
    result may be passed to `accelerator.prepare` together with the model, which does not change it.

    `accelerator.save_state` saves the progress of the loop, and `load_state` resumes there. A `state_dict()` of the
    result or of `loader` covers the batches that the loop received, although Accelerate has prefetched one more.

    Args:
        accelerator: An `accelerate.Accelerator`.
        loader: An `hr.DataLoader`. Or a torch loader, or a result of `accelerator.prepare` or `skip_first_batches`,
            whose engine is replaced.

    Returns:
        A loader of Accelerate's class.

    Raises:
        OptionError: Accelerate is configured to use torchdata's StatefulDataLoader, which has its own engine.
    """
    if getattr(accelerator, "use_stateful_dataloader", False):
        raise check.conflict("Accelerate's use_stateful_dataloader=True", "headrace", "use one of the loaders")
    if hasattr(loader, "base_dataloader"):
        return _with_our_engine(loader, loader.base_dataloader)
    if getattr(loader, "regime", "torch") == "torch":
        prepared = _with_our_engine(accelerator.prepare_data_loader(loader), loader)
        if isinstance(loader, DataLoader):
            loader._instead = prepared  # from now on the states of `loader` are those of `prepared`
        return prepared
    prepared = _prepared_batches(accelerator, loader)
    prepared._is_accelerate_prepared = True
    return accelerator.prepare_data_loader(prepared)  # prepared already: this only registers it


class TitanState:
    """A loader's state in torchtitan's checkpoints, with the two methods of a component.

    A state that is valid for all ranks is stored once, and any number of ranks can resume from it. Otherwise each rank
    stores its own state by its number, and the number of ranks must stay the same.

    Args:
        loader: The component's loader.
        dp_rank: The component's data-parallel rank, as passed by torchtitan.
    """

    def __init__(self, loader: DataLoader[Any], dp_rank: int) -> None:
        self._loader, self._own = loader, f"dp_rank_{dp_rank}"

    def state_dict(self) -> dict[str, str]:
        """Return the state after the batches that the loop has received: one JSON text by its name."""
        state = self._loader.state_dict()
        is_everybodys = self._loader.regime == "headrace" and "rank" not in state
        return {"all_ranks" if is_everybodys else self._own: json.dumps(state)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Resume from a state. An empty state is the start.

        Raises:
            StateMismatchError: the state is not this rank's, or belongs to other data or another order.
        """
        packed = state.get("all_ranks", state.get(self._own))
        if packed is None and state:
            raise StateMismatchError(
                f"the checkpoint has states of the loaders of {', '.join(sorted(state))}, and none of {self._own}: "
                "with operators that skip samples each rank has its own state, and as many ranks must resume",
                field="world_size",
            )
        self._loader.load_state_dict({} if packed is None else json.loads(packed))


class _Prepared(Protocol):
    base_dataloader: torch.utils.data.DataLoader[object]
    iteration: object
    use_stateful_dataloader: bool
    _is_accelerate_prepared: bool
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], None]
    _update_state_dict: Callable[[], None]


class Batches(torch.utils.data.IterableDataset[object]):
    """Batches of a loader as a torch data set, for frameworks that build their own loader.

    That loader must not batch again and must have no workers: `batch_size=None, num_workers=0`.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self.loader = loader
        self._is_prepared = False

    def __iter__(self) -> Iterator[object]:
        if not self._is_prepared and _processes_of_accelerate() > 1:
            raise OptionError(
                "Accelerate would divide these batches among processes once more, or have one process read for all, "
                "and samples would be lost: give the loader itself to headrace.integrations.prepare"
            )
        iterator = iter(self.loader)
        if self._is_prepared:
            self.loader._behind.check_even(self.loader.ranks)  # type: ignore[union-attr]
        return iterator

    def __len__(self) -> int:
        """Number of batches in an epoch. TypeError if it is not known before the epoch ends."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter` start this epoch.

        Accelerate counts from 0 in each process, and calls this before each of its epochs. If the loader was resumed
        from a state, Accelerate continues to count from the epoch of the state.
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
        """Skip in the loader the batches that Accelerate would drop after `skip_first_batches`."""
        skipped = vars(shard).get("_skipped_by_loader", getattr(shard, "skip_batches", 0))
        if not skipped:
            return
        with contextlib.suppress(LoaderBusyError):  # then Accelerate drops them
            self.loader.skip(skipped)
            shard.skip_batches, shard._skipped_by_loader = 0, skipped


def _processes_of_accelerate() -> int:
    module = sys.modules.get("accelerate.state")
    return 1 if module is None else int(module.PartialState._shared_state.get("num_processes", 1))


def _prepared_batches(accelerator: Any, loader: DataLoader[object]) -> _Prepared:
    # As for one process: the loader has already selected this rank's samples. Accelerate's loader gets a data set of
    # batches, because `skip_first_batches` makes a new loader from the data set.
    prepare_data_loader = importlib.import_module("accelerate.data_loader").prepare_data_loader
    source = Batches(loader)
    source._is_prepared = True
    batches: torch.utils.data.DataLoader[object] = torch.utils.data.DataLoader(
        source, batch_size=None, collate_fn=as_it_is
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
    prepared.use_stateful_dataloader = True  # makes `save_state` and `load_state` use its state
    return prepared


def _with_our_engine(prepared: _Prepared, source: object) -> _Prepared:
    """Replace the loader inside Accelerate's. Missing options come from `source`."""
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
    prepared._update_state_dict = lambda: None  # states are made on request
    prepared.use_stateful_dataloader = True
    return prepared


def _state_of_shard(place: weakref.ref[_Prepared], base: DataLoader[object]) -> dict[str, object]:
    prepared = place()
    if prepared is None:  # collected already: `state_dict` is a partial, which does not keep it alive
        return _state_of(base)
    if _processes_of_accelerate() > 1 and type(prepared).__name__ == "DataLoaderDispatcher":
        return _no_state("one process reads for all, by dispatch_batches, and the others know nothing of its place")
    state = _state_of(base)
    return {**state, "iteration": base._loop.next_epoch(prepared.iteration)}


def _have_shard_go_on(place: weakref.ref[_Prepared], base: DataLoader[object], state: Mapping[str, object]) -> None:
    _go_on(base, {name: value for name, value in state.items() if name != "iteration"})
    prepared = place()
    if prepared is not None:
        prepared.iteration = state.get("iteration", prepared.iteration)  # passed to samplers when an epoch starts


def _state_of(loader: DataLoader[object]) -> dict[str, object]:
    """Return the loader's state, or the reason for its absence, so that a run can be saved."""
    try:
        return loader.state_dict()
    except OptionError as error:
        return _no_state(str(error))


def _no_state(why: str) -> dict[str, object]:
    log.warning("the loader's place in its data is not saved: %s", printable(why))
    return {"no_state": why}


def _go_on(loader: DataLoader[object], state: Mapping[str, object]) -> None:
    if "no_state" in state:
        log.warning("the loader starts a new epoch: %s", printable(str(state["no_state"])))
    else:
        loader.load_state_dict(state)


def _made_by_torch(loader: torch.utils.data.DataLoader[object]) -> tuple[str, ...]:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "sampler", "batch_sampler"
    return ("batch_sampler",) if loader.batch_sampler is None else ("sampler", "batch_size", "drop_last")
