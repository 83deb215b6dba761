"""How things travel to workers that pickle does not take, or makes something else of: as if they were inherited."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import Context, ContextVar
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from headrace.lately import torch_is_loaded
from headrace.torch_compat.by_value import modules_by_value

if TYPE_CHECKING:
    import torch

Reduced = tuple[object, ...]
"""What `__reduce_ex__` gives: a function, its arguments, a state, items, entries, and what sets the state."""

_MISSING = object()
_pending = threading.local()
_kept: list[object] = []


def reduced(obj: object, is_by_name: Callable[[Callable[..., object]], bool]) -> Reduced | None:
    """What is pickled for `obj`, as `__reduce_ex__` gives it; None where pickle itself does well.

    Args:
        is_by_name: whether workers find a function or class where it is defined.
    """
    if torch_is_loaded():
        _know_torchs()
    kind = type(obj)
    if type(obj) is functools._lru_cache_wrapper:
        return None if is_by_name(obj) else _of_cache(obj)
    reduce = _REDUCERS.get(kind)
    if reduce is not None:
        return reduce(obj)
    if obj is os.environ:
        return getattr, (os, "environ")
    return _of_kind.dispatch(kind)(obj)


@functools.singledispatch
def _of_kind(obj: object) -> Reduced | None:
    """What is pickled for instances of a class, and of those derived from it."""
    return _of_guessing(obj) if guesses(type(obj)) else None


def is_ordinary(kind: type) -> bool:
    """Whether all instances of a class are pickled as pickle does it: those of the user's own classes, mostly."""
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__ if base not in _ORDINARY}
    return not guesses(kind) and homes.isdisjoint(_SPECIAL)


_ORDINARY = {object, tuple, list, dict, set, frozenset, str, bytes, int, float}
_SPECIAL = {"torch", "numpy", "headrace", *sys.stdlib_module_names} - {
    *("abc", "collections", "dataclasses", "datetime", "decimal", "enum", "fractions", "pathlib", "typing", "uuid"),
}


# Functions that remember what they gave.


def _of_cache(wrapper: functools._lru_cache_wrapper[object]) -> Reduced:
    """With an empty memory: what is in it cannot be asked for."""
    attributes = {name: value for name, value in vars(wrapper).items() if name not in _OF_CACHES}
    return _cache, (wrapper.__wrapped__, wrapper.cache_parameters()), attributes, None, None, _set_attributes


class _CacheParameters(TypedDict):
    maxsize: int
    typed: bool


def _cache(function: Callable[..., object], parameters: _CacheParameters) -> functools._lru_cache_wrapper[object]:
    return functools.lru_cache(**parameters)(function)


_OF_CACHES = {"__wrapped__", "cache_parameters"}


@_of_kind.register(functools.cached_property)
def _of_cached_property(found: functools.cached_property[object]) -> Reduced:
    """Without its lock, which Python 3.11 has: an unlocked one is as good."""
    attributes = {name: value for name, value in vars(found).items() if name != "lock"}
    return _cached_property, (type(found), hasattr(found, "lock")), attributes, None, None, _set_attributes


def _cached_property(kind: type[functools.cached_property[object]], has_lock: bool) -> object:
    made = kind.__new__(kind)
    if has_lock:
        vars(made)["lock"] = threading.RLock()
    return made


def _set_attributes(obj: object, attributes: dict[str, object]) -> None:
    obj.__dict__.update(attributes)


# Weak references. What they refer to travels with them, and stays if nobody else holds it, as it would after a fork:
# there whoever holds it in the trainer is in the worker too.


def _of_reference(reference: weakref.ReferenceType[object]) -> Reduced:
    return _reference, (reference(), reference.__callback__)


def _reference(target: object, callback: Callable[[weakref.ref[object]], object] | None) -> weakref.ref[object]:
    if target is None:
        return weakref.ref(_Gone())
    _keep_pending(target)
    return weakref.ref(target, callback)


class _Gone:
    """Nobody holds it."""


def _of_weak_method(reference: weakref.WeakMethod[Callable[..., object]]) -> Reduced:
    return _weak_method, (reference(),)


def _weak_method(method: MethodType | None) -> weakref.WeakMethod[Callable[..., object]]:
    if method is None:
        return weakref.WeakMethod(_Gone().__init__)  # type: ignore[misc]
    _keep_pending(method.__self__)
    return weakref.WeakMethod(method)


def _of_weak_set(found: weakref.WeakSet[object]) -> Reduced:
    return weakref.WeakSet, (), list(found), None, None, _fill_set


def _fill_set(empty: weakref.WeakSet[object], members: list[object]) -> None:
    for member in members:
        _keep_pending(member)
        empty.add(member)


def _of_weak_values(found: weakref.WeakValueDictionary[object, object]) -> Reduced:
    return type(found), (), list(found.items()), None, None, _fill_values


def _fill_values(empty: weakref.WeakValueDictionary[object, object], entries: list[tuple[object, object]]) -> None:
    for key, value in entries:
        _keep_pending(value)
        empty[key] = value


def _of_weak_keys(found: weakref.WeakKeyDictionary[object, object]) -> Reduced:
    return type(found), (), list(found.items()), None, None, _fill_keys


def _fill_keys(empty: weakref.WeakKeyDictionary[object, object], entries: list[tuple[object, object]]) -> None:
    for key, value in entries:
        _keep_pending(key)
        empty[key] = value


def _keep_pending(target: object) -> None:
    _pending.targets[id(target)] = target


class Unpickling:
    """Within, what workers are sent is unpickled."""

    def __enter__(self) -> None:
        _pending.targets = {}

    def __exit__(self, *_: object) -> None:
        """What weak references refer to is kept from here on where nothing else holds it."""
        targets, _pending.targets = _pending.targets, {}
        if targets:
            targets[None] = object()
            held = {key: sys.getrefcount(target) for key, target in targets.items()}
            _kept.extend(target for key, target in targets.items() if key is not None and held[key] <= held[None])


# torch's.


@functools.cache
def _know_torchs() -> None:
    from headrace.torch_compat import storages

    _REDUCERS.update(storages.REDUCERS)
    _of_kind.register(storages.WrappedPipe)(storages.of_wrapped_pipe)


def with_attributes(tensor: torch.Tensor, plainly: Reduced) -> Reduced:
    """A tensor with what was made an attribute of it."""
    attributes = vars(tensor)
    return (*plainly[:2], attributes, None, None, _set_attributes) if attributes and len(plainly) == 2 else plainly


# Python's.


def _of_proxy(proxy: MappingProxyType[object, object]) -> Reduced:
    """Of the dict behind it, which others may hold and change."""
    (behind,) = gc.get_referents(proxy)
    return MappingProxyType, (behind if type(behind) is dict else dict(proxy),)


def _of_context_variable(variable: ContextVar[object]) -> Reduced:
    """With the value that it has now; those of modules are found there."""
    script, by_value = sys.modules["__main__"], modules_by_value()
    for name, module in list(sys.modules.items()):
        if module is not script and name not in by_value:
            found = (key for key, value in list(getattr(module, "__dict__", {}).items()) if value is variable)
            if (key := next(found, None)) is not None:
                return _of_module, (name, key), _value_of(variable), None, None, _set_value
    default = Context().run(_default_of, variable)
    return _context_variable, (variable.name, default), _value_of(variable), None, None, _set_value


def _value_of(variable: ContextVar[object]) -> tuple[object, ...]:
    value = variable.get(_MISSING)
    return () if value is _MISSING else (value,)


def _default_of(variable: ContextVar[object]) -> tuple[object, ...]:
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def _context_variable(name: str, default: tuple[object, ...]) -> ContextVar[object]:
    return ContextVar(name, default=default[0]) if default else ContextVar(name)


def _of_module(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


def _set_value(variable: ContextVar[object], value: tuple[object, ...]) -> None:
    if value:
        variable.set(*value)


@_of_kind.register(BaseException)
def _of_exception(error: BaseException) -> Reduced | None:
    """Without a call of its class where that has a constructor of its own, which may want other arguments."""
    kind = type(error)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or any(
        isinstance(vars(base).get("__reduce__"), FunctionType) for base in kind.__mro__
    ):
        return None
    reduce: Callable[[], Any] = error.__reduce__
    _, args, *state = reduce()
    return put_together, (kind, args, {}), *(state or (None,)), None, None, _set_attributes


def put_together(cls: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    """An exception, made without a call of its class."""
    error = cls.__new__(cls, *args)
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    with contextlib.suppress(Exception):
        # For what those of Python itself keep beside: errno, encoding, …
        builtin.__init__(error, *args)  # type: ignore[misc]
    if not isinstance(error, OSError):
        error.args = args
    error.__dict__.update(attributes)
    return error


# Objects that answer for attributes which they have not: data sets that pass on what they are asked to another one.
# pickle asks for methods of theirs that say how they are pickled, and would be given those of the other.


def _looked_up(kind: type, name: str) -> Any:
    """What instances of a class have by this name from their class; None where there is nothing."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def guesses(kind: type) -> bool:
    """Whether instances may answer for attributes that neither they nor their class has."""
    if _looked_up(kind, "__getattr__") is None and not isinstance(kind.__getattribute__, FunctionType):
        return False
    names = ("__reduce_ex__", "__reduce__")
    return not issubclass(kind, type) and all(_looked_up(kind, name) is vars(object)[name] for name in names)


def _of_guessing(obj: object) -> Reduced:
    kind = type(obj)
    given: tuple[object, ...] = ()
    named: dict[str, object] = {}
    if (of_both := _looked_up(kind, "__getnewargs_ex__")) is not None:
        given, named = of_both(obj)
    elif (of_given := _looked_up(kind, "__getnewargs__")) is not None:
        given = of_given(obj)
    own = _looked_up(kind, "__getstate__")
    state = _plain_state(obj) if own is vars(object)["__getstate__"] else own(obj)
    items = list.__iter__(obj) if isinstance(obj, list) else None
    entries = iter(dict.items(obj)) if isinstance(obj, dict) else None
    return _made_again, (kind, given, named), state, items, entries, _set_state


def _plain_state(obj: object) -> tuple[object, dict[str, object]]:
    """Its attributes, and those in slots."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        attributes = None
    slots = {}
    for kind in type(obj).__mro__:
        for name, slot in vars(kind).items():
            if type(slot) is _SLOT:
                try:
                    slots[name] = slot.__get__(obj)
                except AttributeError:  # it is empty
                    continue
    return attributes, slots


class _Slotted:
    __slots__ = ("slot",)


_SLOT = type(vars(_Slotted)["slot"])


def _made_again(kind: Any, given: tuple[object, ...], named: dict[str, object]) -> object:
    return kind.__new__(kind, *given, **named)


def parts_of_state(state: Any) -> tuple[Any, Any]:
    """What `__getstate__` gives: the attributes, or whatever it is, and those in slots; None where there are none."""
    return state if isinstance(state, tuple) and len(state) == 2 else (state, None)


def _set_state(obj: object, state: object) -> None:
    own = _looked_up(type(obj), "__setstate__")
    attributes, slots = parts_of_state(state)
    if own is not None:
        own(obj, attributes if slots == {} else state)
        return
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


def _as_pickle_does(_: object) -> None:
    return None


_REDUCERS: dict[type, Callable[[Any], Reduced | None]] = {
    np.ndarray: _as_pickle_does,
    weakref.ReferenceType: _of_reference,
    weakref.WeakMethod: _of_weak_method,
    weakref.WeakSet: _of_weak_set,
    weakref.WeakValueDictionary: _of_weak_values,
    weakref.WeakKeyDictionary: _of_weak_keys,
    MappingProxyType: _of_proxy,
    ContextVar: _of_context_variable,
}
