"""Why something cannot be sent to a worker: the path to the attribute at fault, and what to do about it."""

from __future__ import annotations

import dis
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import CannotCarryError
from headrace.torch_compat import serialize

_MOST_LOOKED_AT = 100_000
_DEEPEST = 100
_LONGEST = 240
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_Part = tuple[str, object]


FORK = 'or give multiprocessing_context="fork"'


def cannot_carry(error: BaseException, values: Mapping[str, object], offer: str = FORK) -> CannotCarryError:
    """The error to raise when what workers need did not pickle; it is a TypeError.

    Args:
        error: what the attempt raised.
        values: what was to be sent, by the names that the user knows, such as "dataset" and "collate_fn".
        offer: what else may be done.
    """
    text = _refusal(error, values)
    return CannotCarryError(
        f"{text}. Workers are processes that are not forked from this one. "
        "Open it in the worker instead, when it is first used, in __getitem__, __iter__ or worker_init_fn, "
        f"and leave it None until then{offer and '; '}{offer}.",
        what=text,
    )


def cannot_carry_index(error: BaseException, index: object) -> CannotCarryError:
    """Return the error for an index that a sampler gave."""
    text = _refusal(error, {"sampler's index": index})
    return CannotCarryError(
        f"{text}. Indices go to workers that run already, also where these were forked: have the sampler give "
        "numbers, texts or tuples of them, and open the rest in __getitem__.",
        what=text,
    )


def _refusal(error: BaseException, values: Mapping[str, object]) -> str:
    found = (_found(value, name) for name, value in values.items())
    what, why = next((reason for reason in found if reason is not None), (" and ".join(values) or "something", error))
    return f"{what} cannot be sent to a worker: {why}"


def why_not(value: object, name: str) -> str | None:
    """Which part of `value` cannot be pickled, such as "dataset.transforms[2].log (a _io.BufferedReader)".

    None if all of it can. What it takes is some attempts at pickling `value`, and as many looks at its parts as there
    are, up to a limit; beyond it the answer is the innermost part that was found so far.

    Args:
        value: what was to be sent.
        name: what the path begins with.
    """
    found = _found(value, name)
    return None if found is None else found[0]


def _found(value: object, name: str) -> tuple[str, Exception] | None:
    """The same, with what is raised when that part alone is sent."""
    error = _why_not_carried(value)
    if error is None:
        return None
    path, fault = _Search().fault(value, name) or (name, value)
    kind = type(fault)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    if len(path) > _LONGEST:
        path = f"{path[: _LONGEST // 2]}…{path[-_LONGEST // 2 :]}"
    return f"{path} (a {home}{kind.__qualname__})", _why_not_carried(fault) or error


def _why_not_carried(value: object) -> Exception | None:
    return None if type(value) in _SIMPLE else serialize.why_not_for_workers(value)


class _Search:
    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # the values themselves too, so that no other one gets the id of one of them
        self._failing: set[int] = set()

    def fault(self, value: object, path: str, depth: int = 0) -> tuple[str, object] | None:
        """The innermost part of `value` that fails by itself; None if it fails only for what was met before.

        Objects that know one another all fail for the lock that one of them holds.
        """
        self._seen[id(value)] = value
        self._failing.add(id(value))
        fails_by_itself = True
        for part_path, part in _parts(value, path) if depth < _DEEPEST else ():
            if type(part) in _SIMPLE:
                continue
            if id(part) in self._seen:
                fails_by_itself &= id(part) not in self._failing
                continue
            if len(self._seen) > _MOST_LOOKED_AT:
                break
            self._seen[id(part)] = part
            if _why_not_carried(part) is not None:
                found = self.fault(part, part_path, depth + 1)
                if found is not None:
                    return found
                fails_by_itself = False
        return (path, value) if fails_by_itself else None


def _parts(value: object, path: str) -> Iterator[_Part]:
    """What is pickled when `value` is, with the path to each."""
    kind = type(value)
    yield from (_PARTS_OF_EXACTLY.get(kind) or _parts_of.dispatch(kind))(value, path)


@functools.singledispatch
def _parts_of(value: object, path: str) -> Iterator[_Part]:
    """The parts that the way in which it is pickled gives: a `__getstate__` of its own may leave out what hinders."""
    try:
        reduced = serialize.reduced_for_workers(value)
    except Exception:  # it is this very value that cannot be pickled
        return
    if not isinstance(reduced, tuple):
        return
    function, args, state, items, entries = (*reduced, None, None, None)[:5]
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(part, dict):
            yield from _of_attributes(part, path)
        elif part is not None:
            yield f"{path}.<state>", part
    yield from ((f"{path}[{number}]", part) for number, part in enumerate(items or ()))
    yield from _of_entries(entries or iter(()), path)
    for number, part in enumerate((function, *args)):
        if part is type(value):
            yield f"type({path})", part
        elif number:
            yield f"{path}.<argument {number - 1}>", part


@_parts_of.register(tuple)
def _of_named_tuple(value: tuple[object, ...], path: str) -> Iterator[_Part]:
    if hasattr(value, "_fields"):
        yield from ((f"{path}.{name}", part) for name, part in zip(value._fields, value, strict=False))
    else:
        yield from _parts_of.dispatch(object)(value, path)


@_parts_of.register(functools.partial)
def _of_partial(value: functools.partial[object], path: str) -> Iterator[_Part]:
    yield f"{path}.func", value.func
    yield from _parts(value.args, f"{path}.args")
    yield from _parts(value.keywords, f"{path}.keywords")


@_parts_of.register(MethodType)
def _of_method(value: MethodType, path: str) -> Iterator[_Part]:
    yield f"{path}.__self__", value.__self__
    yield f"{path}.__func__", value.__func__


@_parts_of.register(FunctionType)
def _of_function(function: FunctionType, path: str) -> Iterator[_Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.<variable {name}>", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        yield f"{path}.<global {name}>", function.__globals__[name]
    for number, default in enumerate(function.__defaults__ or ()):
        yield f"{path}.<default {number}>", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"{path}.<default {name}>", default
    yield from _of_attributes(function.__dict__, path)


@_parts_of.register(property)
def _of_property(value: property, path: str) -> Iterator[_Part]:
    yield from ((f"{path}.{name}", getattr(value, name)) for name in ("fget", "fset", "fdel"))


@_parts_of.register(staticmethod)
@_parts_of.register(classmethod)
def _of_plain_method(value: staticmethod[..., object] | classmethod[object, ..., object], path: str) -> Iterator[_Part]:
    yield f"{path}.__func__", value.__func__


@_parts_of.register(functools._lru_cache_wrapper)
def _of_cache(value: functools._lru_cache_wrapper[object], path: str) -> Iterator[_Part]:
    yield f"{path}.__wrapped__", value.__wrapped__


@_parts_of.register(np.ndarray)
def _of_array(value: NDArray[np.generic], path: str) -> Iterator[_Part]:
    if value.dtype.hasobject:
        yield from ((f"{path}.flat[{number}]", part) for number, part in enumerate(value.flat))


@_parts_of.register(torch.Tensor)
def _of_tensor(value: torch.Tensor, path: str) -> Iterator[_Part]:
    yield from _of_attributes(vars(value), path)


@_parts_of.register(type)
def _of_class(value: type, path: str) -> Iterator[_Part]:
    yield from _of_attributes({k: v for k, v in vars(value).items() if k not in {"__dict__", "__weakref__"}}, path)
    yield from ((f"{path}.<base {base.__qualname__}>", base) for base in value.__bases__)


@_parts_of.register(enum.EnumType)
def _of_enum(value: type[enum.Enum], path: str) -> Iterator[_Part]:
    yield from _of_attributes({name: member.value for name, member in value.__members__.items()}, path)


def _global_names(code: CodeType) -> set[str]:
    """The global names that a function and those inside it use."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname.endswith("_GLOBAL")}
    return own.union(*(_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def _of_attributes(attributes: Mapping[Any, object], path: str) -> Iterator[_Part]:
    for name, part in attributes.items():
        yield (f"{path}.{name}" if isinstance(name, str) and name.isidentifier() else f"{path}.<state>[{name!r}]"), part


def _of_entries(entries: Iterator[tuple[object, object]], path: str) -> Iterator[_Part]:
    for key, part in entries:
        short = repr(key) if isinstance(key, str | int) and len(repr(key)) < 60 else f"<{type(key).__qualname__}>"
        yield f"{path}[{short}]", part
        yield f"{path}.<key {short}>", key


def _of_dict(value: dict[object, object], path: str) -> Iterator[_Part]:
    yield from _of_entries(iter(value.items()), path)


def _of_sequence(value: Sequence[object], path: str) -> Iterator[_Part]:
    yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))


def _of_set(value: AbstractSet[object], path: str) -> Iterator[_Part]:
    yield from ((f"{path}.<element>", part) for part in value)


_PARTS_OF_EXACTLY: dict[type, Callable[[Any, str], Iterator[_Part]]] = {
    dict: _of_dict,
    list: _of_sequence,
    tuple: _of_sequence,
    set: _of_set,
    frozenset: _of_set,
}
"""Of types whose subclasses pickle in ways of their own."""
