"""Checks of a loaded state against a loader of torch data sets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _DatasetKind

from headrace.errors import StateMismatchError
from headrace.state.state import VERSION, check_kind, is_as_saved, whole_check
from headrace.torch_compat.indices import SamplerState, decoded
from headrace.torch_compat.stateful import chain_of, parts_of
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_regime.state import CopyState, LoaderState, StateDict

_OF_ECONOMIC = ("epoch_of_samples", "run")
_FIELDS = tuple(name for name in StateDict.__annotations__ if name not in ("version", "regime", "check", *_OF_ECONOMIC))
_FIELDS_OF = {"sampler": tuple(SamplerState.__annotations__), "copies": tuple(CopyState.__annotations__)}
_OPTIONAL = frozenset(("batch_size", "shared_seed", "samples"))
_NUMBERS = _OPTIONAL | {"num_workers", "base_seed", "batches", "known", "due", "turn", "epoch_of_samples", "run"}
_NUMBER_MOST = 2**64
_FLAGS = frozenset(("is_map", "economic", "is_finished", "is_over"))
_DATA = {
    "count": "the data set has another number of samples",
    "sampler_type": "the sampler is of another kind",
    "num_replicas": "the sampler divides its indices among another number of ranks",
    "sampler_seed": "the sampler has another seed",
    "sampler_shuffle": "only one of the samplers shuffles",
    "sampler_drop_last": "only one of the samplers drops indices that ranks cannot share evenly",
    "sampler_length": "the sampler gives another number of indices",
    "sampler_replacement": "only one of the samplers draws with replacement",
}
# Samplers whose length is fixed. Others may compute it by drawing an epoch.
_KNOWN_LENGTHS = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
_SENSELESS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check(loader: TorchLoader[object], state: Mapping[str, Any], *, force: bool) -> StateDict:
    """Return a copy of a state that the loader can resume from.

    Args:
        force: Accept other data or another sampler. For map-style data, accept another number of workers and drop the
            states of their data sets. In economic mode, accept another batch size.

    Raises:
        StateMismatchError: the loader cannot resume from it. The message names the field.
    """
    check_kind(state, "torch")
    try:
        loaded = _loadable(loader, copy.deepcopy(dict(state)), force=force)
    except StateMismatchError:
        raise
    except _SENSELESS as error:
        raise StateMismatchError(f"this is no whole state of a loader: {error!r:.200}", field="version") from error
    if not force and not is_as_saved(state):
        raise StateMismatchError("the state is not as it was saved: it was edited, or is damaged", field="check")
    loaded["check"] = whole_check(loaded)  # batches may have another size now
    return loaded


def _loadable(loader: TorchLoader[object], state: dict[str, Any], *, force: bool) -> StateDict:
    ours = common(loader)
    loaded = _checked(state, is_economic=ours["economic"])
    _compare(loaded, ours, force=force)
    if loaded["is_map"] and loaded["sampler"] is None:
        raise StateMismatchError("sampler: it is missing, and data with __getitem__ needs one", field="sampler")
    if not loaded["is_map"] and len(loaded["copies"]) != max(1, loaded["num_workers"]):
        text = f"copies: {len(loaded['copies'])} of them, for num_workers={loaded['num_workers']}"
        raise StateMismatchError(text, field="copies")
    if loaded["generator"] != ours["generator"]:
        raise StateMismatchError(
            f"generator: True if the loader has one, and its sampler: {loaded['generator']} in the state, "
            f"{ours['generator']} in the loader",
            field="generator",
        )
    if loaded["num_workers"] != loader.num_workers and not loader.economic:
        if not (force and loaded["is_map"]):
            raise StateMismatchError(
                f"num_workers: {loaded['num_workers']} in the state, {loader.num_workers} in the loader; each worker's "
                "copy of the data set has a state of its own",
                field="num_workers",
            )
        loaded["num_workers"], loaded["copies"] = loader.num_workers, []
        loaded["turn"] = loaded["due"] % max(1, loader.num_workers)
    batch_size = ours["batch_size"]
    if loaded["batch_size"] != batch_size:
        if not _fits(loaded, loader, batch_size, force=force):
            raise StateMismatchError(
                f"batch_size: {loaded['batch_size']} in the state, {batch_size} in the loader; the rest of "
                "this epoch cannot be divided into such batches: end it with the same ones",
                field="batch_size",
            )
        if batch_size is not None and loaded["is_map"] and not loaded["is_finished"]:
            _renumber(loaded, batch_size)
    return loaded


def _compare(loaded: Mapping[str, object], ours: Mapping[str, object], *, force: bool) -> None:
    """Raise StateMismatchError if the loader's data or sampler differ from the state's."""
    for name in ("is_map", "economic"):
        if loaded[name] != ours[name]:
            raise StateMismatchError(f"{name}: {loaded[name]} in the state, {ours[name]} in the loader", field=name)
    for name, meaning in _DATA.items():
        if None not in (loaded[name], ours[name]) and loaded[name] != ours[name] and not force:
            raise StateMismatchError(
                f"{name}: {meaning}: {loaded[name]!r} in the state, {ours[name]!r} in the loader", field=name
            )


def _fits(loaded: StateDict, loader: DataLoader[object], batch_size: int | None, *, force: bool) -> bool:
    """True if a loader with another batch size can resume and deliver each sample once.

    No received batch may have to be made again or skipped later, as it would have other samples. The received batches
    must be a whole number of new batches, as later states count these.
    """
    if loaded["is_finished"]:
        return True
    if batch_size is None or loaded["batch_size"] is None or type(loader._index_sampler) is not BatchSampler:
        return False
    sampler = loaded["sampler"]
    if sampler is not None and (sampler["samples"] is None or sampler["samples"] % batch_size):
        return False
    if loaded["beyond"] or (sampler is not None and sampler["batches"] != loaded["due"]):
        return False
    if any(known["known"] != known["batches"] for known in loaded["copies"]):
        return False
    return not loaded["economic"] or force  # there `__getitems__` draws random numbers per batch


def _renumber(loaded: StateDict, batch_size: int) -> None:
    count = max(1, loaded["num_workers"])
    sampler = loaded["sampler"]
    assert sampler is not None
    assert sampler["samples"] is not None
    loaded["due"] = sampler["batches"] = sampler["samples"] // batch_size
    loaded["turn"] = loaded["due"] % count
    for worker, known in enumerate(loaded["copies"]):
        known["batches"] = known["known"] = len(range(worker, loaded["due"], count))


def _checked(state: Any, *, is_economic: bool) -> StateDict:
    """Check that a state is complete, or raise StateMismatchError. Values may still be wrong."""
    parts: list[tuple[str, object, tuple[str, ...]]] = [("", state, _FIELDS)]
    if is_economic and state.get("economic"):
        parts.append(("", state, _OF_ECONOMIC))
    if state.get("sampler") is not None:
        parts.append(("sampler", state["sampler"], _FIELDS_OF["sampler"]))
    copies = state.get("copies", ())
    parts += [("copies", known, _FIELDS_OF["copies"]) for known in (copies if _is_row(copies) else [copies])]
    for where, part, names in parts:
        for name in names:
            field = where or name
            if not isinstance(part, dict) or name not in part:
                raise StateMismatchError(f"{field}: {name!r} is missing: this is no whole state", field=field)
            value, text = part[name], None
            is_number = type(value) is int and 0 <= value < _NUMBER_MOST
            if name in _NUMBERS and not is_number and not (value is None and name in _OPTIONAL):
                text = f"{field}: {name!r} is {value!r:.50}"
            elif name in _FLAGS and type(value) is not bool:
                text = f"{field}: {name!r} is {value!r:.50}, neither true nor false"
            elif name == "states" and not isinstance(value, dict | None):
                text = f"{where}: 'states' is {value!r:.50}"
            if text is not None:
                raise StateMismatchError(text, field=field)
    try:
        state["beyond"] = [(int(start), int(stop)) for start, stop in state["beyond"]]
    except (TypeError, ValueError) as error:
        raise StateMismatchError(f"beyond: {state['beyond']!r:.50} are no ranges", field="beyond") from error
    starts = (None, None) if state["sampler"] is None else state["sampler"]["start"]
    if not _is_row(state["generators"]):
        raise StateMismatchError(f"generators: {state['generators']!r:.50} is no list", field="generators")
    if not _is_row(starts) or len(starts) != 2:
        raise StateMismatchError(f"sampler: {starts!r:.50} is no start", field="sampler")
    for text in state["generators"]:
        decoded(text)
    for text in starts:
        if text is not None:
            decoded(text)
    whole: StateDict = state
    return whole


def _is_row(value: object) -> bool:
    return isinstance(value, list | tuple)


def common(loader: DataLoader[object]) -> LoaderState:
    """Return a state's description of its loader, without progress."""
    is_map = loader._dataset_kind == _DatasetKind.Map
    sampler = loader._index_sampler
    inmost = sampler.sampler if type(sampler) is BatchSampler else sampler
    ranks = next(parts_of(sampler, (DistributedSampler,)), None)
    random = next(parts_of(sampler, (RandomSampler, WeightedRandomSampler)), None)
    return {
        "version": VERSION,
        "regime": "torch",
        "is_map": is_map,
        "economic": getattr(loader, "economic", True),
        "num_workers": loader.num_workers,
        "batch_size": _number(sampler, "batch_size"),
        "epoch": epoch_of(loader),
        "count": _count_of(loader.dataset) if is_map else None,
        "sampler_type": type(inmost).__name__ if is_map else None,
        "sampler_length": next(map(_count_of, parts_of(sampler, _KNOWN_LENGTHS)), None) if is_map else None,
        "sampler_replacement": _number(random, "replacement"),
        "generator": [loader.generator is not None, _has_generator(sampler)],
        "num_replicas": _replicas_of(sampler) if is_map else None,
        "sampler_seed": _number(ranks, "seed"),
        "sampler_shuffle": _number(ranks, "shuffle"),
        "sampler_drop_last": _number(ranks, "drop_last"),
    }


def _count_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a data set whose keys only the sampler knows
        return None


def _has_generator(sampler: object) -> bool:
    own = (part for part in chain_of(sampler) if type(part) in _DRAWING)
    return any(part.generator is not None for part in own)


def _replicas_of(sampler: object) -> int | None:
    names = ("num_replicas", "num_processes")
    counts = (_number(part, name) for part in chain_of(sampler) for name in names)
    return next((count for count in counts if count is not None), None)


def _number(thing: object, name: str) -> int | None:
    value = getattr(thing, name, None)
    return value if isinstance(value, int) else None


def epoch_of(loader: DataLoader[object]) -> int | None:
    """Return the last epoch set on a sampler that has epochs, or None."""
    samplers = (sampler for sampler in chain_of(loader._index_sampler) if hasattr(sampler, "set_epoch"))
    epochs = (_number(sampler, "epoch") for sampler in samplers)
    return next((epoch for epoch in epochs if epoch is not None), None)
