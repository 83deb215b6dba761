"""States of data sets, samplers and generators of torch and the user.

An object is stateful if it has both `state_dict` and `load_state_dict`. Nothing else is required.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from headrace._util.torch_lazy import torch_is_loaded
from headrace.errors import StateMismatchError
from headrace.torch_compat import serialize
from headrace.workers.failures import PackedError

_NESTED_MOST = 8

PackedStates = bytes | PackedError
"""Pickled states, or the error raised by `state_dict`."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


States = dict[str, object]
"""States by the role of the object: "dataset", "sampler", "iterator"."""


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """True if an object has a state. The parameters of a module do not count."""
    if torch_is_loaded() and _is_module(thing):
        return False
    try:
        return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    except Exception:  # a property that raises
        return False


def _is_module(thing: object) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module) and type(thing).state_dict is torch.nn.Module.state_dict


def load(thing: object, states: States | None, name: str) -> None:
    """Load an object's entry of `states`, if any, or raise StateMismatchError if not stateful."""
    if not states or name not in states:
        return
    if not is_stateful(thing):
        raise StateMismatchError(
            f"the state has one of the {name}, and {type(thing).__name__} has no load_state_dict", field=name
        )
    thing.load_state_dict(states[name])


def packed_states(dataset: object, iterator: object) -> PackedStates | None:
    """Return the states of a data set and its iterator. None if neither is stateful.

    One object in both roles has one entry. An error does not stop batches: `unpacked_states` raises it.
    """
    states = {}
    try:
        if iterator is not dataset and is_stateful(dataset):
            states["dataset"] = dataset.state_dict()
        if iterator is not None and is_stateful(iterator):
            states["iterator"] = iterator.state_dict()
        return serialize.pack_bytes(states) if states else None
    except Exception as error:
        return failed(error, "raised where the state of the data set was asked for")


def failed(error: Exception, note: str) -> PackedError:
    error.add_note(note)
    return serialize.pack_error(error)


def is_known(packed: PackedStates | None) -> TypeGuard[bytes]:
    return isinstance(packed, bytes)


def unpacked_states(packed: PackedStates | None) -> States | None:
    if packed is None:
        return None
    if isinstance(packed, PackedError):
        raise serialize.unpack_error(packed)
    states: States = serialize.unpack_bytes(packed)
    return states


def chain_of(sampler: object) -> Iterator[Any]:
    """Yield a sampler, the sampler it takes indices from, and so on."""
    for _ in range(_NESTED_MOST):  # objects with a `__getattr__` may never end the chain
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


def parts_of(sampler: object, kinds: tuple[type, ...]) -> Iterator[Any]:
    return (part for part in chain_of(sampler) if isinstance(part, kinds))
