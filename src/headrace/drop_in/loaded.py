"""A state that a loader of the torch regime was given: whether it can go on from that."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

from headrace.drop_in.state import State
from headrace.errors import StateMismatchError
from headrace.state import VERSION, check_kind
from headrace.torch_compat.stateful import chain_of, decoded

_FIELDS = (
    *("is_map", "economic", "num_workers", "epoch", "count", "sampler_type", "base_seed", "shared_seed"),
    *("is_finished", "batches", "due", "beyond", "turn", "generators", "sampler", "copies"),
)
_FIELDS_OF = {
    "sampler": ("batches", "samples", "is_over", "start", "states"),
    "copies": ("batches", "known", "is_over", "states"),
}
_DATA = {"count": "the data set has another number of samples", "sampler_type": "the sampler is of another kind"}


def check(loader: Any, state: Any, *, force: bool) -> State:
    """A copy of a state, if the loader can go on from it.

    Args:
        force: for map-style data, take one of another number of workers; what their copies had as state is left out.

    Raises:
        StateMismatchError: it cannot; says which field differs.
    """
    check_kind(state, "torch")
    told: State = copy.deepcopy(dict(state))
    ours = common(loader)
    _check_fields(told, is_economic=ours["economic"])
    for name in ("is_map", "economic"):
        if told[name] != ours[name]:
            raise StateMismatchError(f"{name}: {told[name]} in the state, {ours[name]} in the loader", field=name)
    for name, meaning in _DATA.items():
        if None not in (told[name], ours[name]) and told[name] != ours[name] and not force:
            raise StateMismatchError(
                f"{name}: {meaning}: {told[name]!r} in the state, {ours[name]!r} in the loader", field=name
            )
    if told["num_workers"] != loader.num_workers and not loader.economic:
        if not (force and told["is_map"]):
            raise StateMismatchError(
                f"num_workers: {told['num_workers']} in the state, {loader.num_workers} in the loader; each worker's "
                "copy of the data set has a state of its own",
                field="num_workers",
            )
        told.update(num_workers=loader.num_workers, copies=[], turn=told["due"] % max(1, loader.num_workers))
    return told


def _check_fields(state: State, *, is_economic: bool) -> None:
    """Whether a state is whole; what is in it may still be wrong.

    Raises:
        StateMismatchError: it is not; says which field is missing, or what of it makes no sense.
    """
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("", state, _FIELDS)]
    if is_economic and state.get("economic"):
        parts.append(("", state, ("epoch_of_samples", "run")))
    if state.get("sampler") is not None:
        parts.append(("sampler", state["sampler"], _FIELDS_OF["sampler"]))
    copies = state.get("copies", ())
    parts += [("copies", known, _FIELDS_OF["copies"]) for known in (copies if isinstance(copies, list) else [copies])]
    for where, part, names in parts:
        for name in names:
            if not isinstance(part, dict) or name not in part:
                field = where or name
                raise StateMismatchError(f"{field}: {name!r} is missing: this is no whole state", field=field)
    try:
        state["beyond"] = [(int(start), int(stop)) for start, stop in state["beyond"]]
    except (TypeError, ValueError) as error:
        raise StateMismatchError(f"beyond: {state['beyond']!r:.50} are no ranges", field="beyond") from error
    for text in state["generators"]:
        decoded(text)
    for text in () if state["sampler"] is None else state["sampler"]["start"]:
        if text is not None:
            decoded(text)


def common(loader: Any) -> State:
    """What a state says of a loader, besides how far it is."""
    is_map = loader._dataset_kind == _DatasetKind.Map
    return {
        "version": VERSION,
        "regime": "torch",
        "is_map": is_map,
        "economic": getattr(loader, "economic", True),
        "num_workers": loader.num_workers,
        "epoch": epoch_of(loader),
        "count": _count_of(loader.dataset) if is_map else None,
        "sampler_type": type(_inmost_batches(loader._index_sampler)).__name__ if is_map else None,
    }


def _count_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a data set that only a sampler knows the keys of
        return None


def _inmost_batches(sampler: Any) -> Any:
    """A sampler; torch's own BatchSampler is looked through."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def epoch_of(loader: Any) -> int | None:
    """The last number that a sampler was given which knows epochs; None where none does."""
    samplers = (sampler for sampler in chain_of(loader._index_sampler) if hasattr(sampler, "set_epoch"))
    epochs = (getattr(sampler, "epoch", None) for sampler in samplers)
    return next((epoch for epoch in epochs if isinstance(epoch, int)), None)
