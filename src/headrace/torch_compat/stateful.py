"""What can be resumed of torch's parts: data sets, samplers and generators.

An object is stateful when it has both `state_dict` and `load_state_dict`; that is all that is asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from headrace.errors import StateMismatchError
from headrace.failures import PackedError
from headrace.lately import torch_is_loaded
from headrace.torch_compat import serialize

_NESTED_MOST = 8

PackedStates = bytes | PackedError
"""States, or why they could not be had."""


class Stateful(Protocol):
    """An object that can say its state, and take it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


States = dict[str, object]
"""What objects have said, by what they are: "dataset", "sampler", "iterator"."""


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Whether an object can say its state, and take it back. The parameters of a module are none."""
    if torch_is_loaded() and _is_module(thing):
        return False
    try:
        return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    except Exception:  # a property that cannot be had
        return False


def _is_module(thing: object) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module) and type(thing).state_dict is torch.nn.Module.state_dict


def load(thing: object, states: States | None, name: str) -> None:
    """Give an object its part of `states`, if there is one.

    Raises:
        StateMismatchError: there is, and the object takes no state.
    """
    if not states or name not in states:
        return
    if not is_stateful(thing):
        raise StateMismatchError(
            f"the state has one of the {name}, and {type(thing).__name__} has no load_state_dict", field=name
        )
    thing.load_state_dict(states[name])


def packed_states(dataset: object, iterator: object) -> PackedStates | None:
    """The states of a data set and of what iterates over it, only once where they are one object; None without any.

    Batches are made whether a state can be had or not: `unpacked_states` raises what goes wrong here.
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
    """What stands for a state that could not be had."""
    error.add_note(note)
    return serialize.pack_error(error)


def is_known(packed: PackedStates | None) -> TypeGuard[bytes]:
    """Whether somebody can go on from a state that `packed_states` gave."""
    return isinstance(packed, bytes)


def unpacked_states(packed: PackedStates | None) -> States | None:
    """The states that `packed_states` gave, as objects of their own."""
    if packed is None:
        return None
    if isinstance(packed, PackedError):
        raise serialize.unpack_error(packed)
    states: States = serialize.unpack_bytes(packed)
    return states


def chain_of(sampler: object) -> Iterator[Any]:
    """A sampler, the one that it takes its indices from, and so on."""
    for _ in range(_NESTED_MOST):  # an object may have an attribute of any name, without end
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


def parts_of(sampler: object, kinds: tuple[type, ...]) -> Iterator[Any]:
    """Those in the chain of a sampler that are of some kinds."""
    return (part for part in chain_of(sampler) if isinstance(part, kinds))
