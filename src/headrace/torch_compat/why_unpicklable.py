"""Reports why a value cannot be sent to a worker: the path to the fault, and the remedy."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType

from headrace.errors import CannotCarryError
from headrace.torch_compat import serialize

_MOST_LOOKED_AT = 100_000
_DEEPEST = 100
_LONGEST = 240
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
FORK = 'or give multiprocessing_context="fork"'


def cannot_carry(error: BaseException, values: Mapping[str, object], offer: str = FORK) -> CannotCarryError:
    """Return the error for values that cannot be pickled for workers, by names that users know."""
    text = _refusal(error, values)
    return CannotCarryError(
        f"{text}. Workers are processes that are not forked from this one. "
        "Open it in the worker instead, when it is first used, in __getitem__, __iter__ or worker_init_fn, "
        f"and leave it None until then{offer and '; '}{offer}.",
        what=text,
    )


def cannot_carry_index(error: BaseException, index: object) -> CannotCarryError:
    text = _refusal(error, {"sampler's index": index})
    return CannotCarryError(
        f"{text}. Indices go to workers that run already, also where these were forked: have the sampler give "
        "numbers, texts or tuples of them, and open the rest in __getitem__.",
        what=text,
    )


def _refusal(error: BaseException, values: Mapping[str, object]) -> str:
    what = " and ".join(values) or "something"
    for name, value in values.items():
        if serialize.why_not_for_workers(value) is not None:
            path, fault = _fault(value, name, {}, set()) or (name, value)
            if len(path) > _LONGEST:
                path = f"{path[: _LONGEST // 2]}…{path[-_LONGEST // 2 :]}"
            home = "" if type(fault).__module__ == "builtins" else f"{type(fault).__module__}."
            what, error = f"{path} (a {home}{type(fault).__qualname__})", serialize.why_not_for_workers(fault) or error
            break
    return f"{what} cannot be sent to a worker: {error}"


def _fault(
    value: object, path: str, seen: dict[int, object], failing: set[int], depth: int = 0
) -> tuple[str, object] | None:
    """Find the innermost part of `value` that fails by itself.

    Return None if it fails only for a part visited before: objects that refer to one another all fail for one lock.
    `seen` also keeps the values alive, so that their ids stay unique.
    """
    seen[id(value)] = value
    failing.add(id(value))
    fails_by_itself = True
    for part_path, part in _parts(value, path) if depth < _DEEPEST else ():
        if type(part) in _SIMPLE or len(seen) > _MOST_LOOKED_AT:
            continue
        if id(part) in seen:
            fails_by_itself &= id(part) not in failing
            continue
        seen[id(part)] = part
        if serialize.why_not_for_workers(part) is not None:
            if (found := _fault(part, part_path, seen, failing, depth + 1)) is not None:
                return found
            fails_by_itself = False
    return (path, value) if fails_by_itself else None


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield (path, part) of everything pickled with `value`, except by custom `__reduce__`."""
    attributes: object = getattr(value, "__dict__", {})
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r:.60}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, functools.partial):
        attributes = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        attributes = {"__self__": value.__self__, "__func__": value.__func__}
    elif isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        yield from ((f"{path}.<variable {name}>", part) for name, part in used.nonlocals.items())
        yield from ((f"{path}.<global {name}>", part) for name, part in used.globals.items())
        yield from ((f"{path}.<default {number}>", part) for number, part in enumerate(value.__defaults__ or ()))
        attributes = {**(value.__kwdefaults__ or {}), **vars(value)}
    elif not isinstance(value, type):
        yield f"type({path})", type(value)
        attributes = {}
        with contextlib.suppress(Exception):  # the value itself cannot be pickled
            attributes = value.__getstate__()
        if isinstance(attributes, tuple) and len(attributes) == 2:  # class with slots
            attributes = {**(attributes[0] or {}), **attributes[1]}
    if isinstance(attributes, Mapping):
        yield from ((f"{path}.{name}", part) for name, part in attributes.items() if name not in _OF_CLASSES)


_OF_CLASSES = ("__dict__", "__weakref__")
