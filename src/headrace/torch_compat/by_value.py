"""Pickling of functions and classes by value: cloudpickle's, with additions for workers."""

from __future__ import annotations

import contextlib
import enum
import importlib
import linecache
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle as internals

Cells = dict[int, tuple[types.CellType, types.CellType]]
"""By the id of a closure cell: the cell, and the empty cell pickled in its place."""

_FILE = 10  # index of the file name among the arguments of a code object
_shared: weakref.WeakSet[type] = weakref.WeakSet()  # classes whose ids both sides of a fork know
_is_forked_worker = False


def share_classes() -> list[type]:
    """Give ids to the classes pickled by value, so that forks of this process can refer to them.

    Returns the classes. The caller keeps them alive for as long as its forks run.
    """
    by_value = modules_by_value()
    classes, waiting = set[type](), [object]
    while waiting:
        new = [kind for kind in type.__subclasses__(waiting.pop()) if kind not in classes]
        classes.update(new)
        waiting += new
    found = [kind for kind in classes if vars(kind).get("__module__") in by_value or "<locals>" in kind.__qualname__]
    for kind in found:
        internals._get_or_create_tracker_id(kind)
    _shared.update(found)
    return found


def begin_forked_worker() -> None:
    global _is_forked_worker
    _is_forked_worker = True


def reference_to(kind: type) -> tuple[Callable[[str], type], tuple[str]] | None:
    """Return the reduced form of a class that this forked worker shares with the trainer."""
    if not _is_forked_worker or kind not in _shared:
        return None
    return _shared_class, (internals._get_or_create_tracker_id(kind),)


def _shared_class(tracker: str) -> type:
    return internals._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]  # type: ignore[no-any-return]


def modules_by_value() -> set[str]:
    """Return the modules that workers cannot import: the script, and those registered in cloudpickle."""
    return {"__main__", *internals.list_registry_pickle_by_value()}


def is_by_name(what: Callable[..., object]) -> bool:
    """True if a function or class is found by its name in a module that is not pickled by value."""
    found: object = sys.modules.get(what.__module__ or "__main__")
    for name in what.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is what and what.__module__ not in modules_by_value()


def load_home(kind: type) -> None:
    """Import the module that a class names as its home, if only its package is (numpy.rec)."""
    home: object = kind.__module__
    if isinstance(home, str) and home not in sys.modules and home.partition(".")[0] in sys.modules and "." in home:
        with contextlib.suppress(ImportError):
            importlib.import_module(home)


def reduced_function(reduced: Any, function: types.FunctionType, cells: Cells) -> object:
    """Keep closure variables that functions share shared after unpickling."""
    if reduced is NotImplemented or function.__closure__ is None:
        return reduced
    make, (*arguments, _), *rest = reduced
    empty = tuple(cells.setdefault(id(cell), (cell, types.CellType()))[1] for cell in function.__closure__)
    return make, (*arguments, empty), *rest


def reduced_code(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[object, ...]]:
    """Reduce code with its file name, which tracebacks need and cloudpickle omits since 3.1.3."""
    make, arguments = internals.Pickler.dispatch_table[types.CodeType](code)
    return make, (*arguments[:_FILE], code.co_filename, *arguments[_FILE + 1 :])


def reduced_code_with_lines(code: types.CodeType) -> object:
    """Reduce code for another process, with source lines that are in no file (notebook cells)."""
    make, arguments = reduced_code(code)
    file = code.co_filename
    if file not in linecache.cache or os.path.exists(file):  # noqa: PTH110 (it may be anything)
        return make, arguments
    return _code_with_lines, (file, linecache.getlines(file), make, arguments)


_brought: set[str] = set()  # files whose lines came with code


def _code_with_lines(
    file: str, lines: list[str], make: Callable[..., types.CodeType], arguments: tuple[object, ...]
) -> types.CodeType:
    """Make code, and add its lines to `linecache` for tracebacks and `inspect`."""
    if file not in linecache.cache or file in _brought:
        _brought.add(file)
        linecache.cache[file] = sum(map(len, lines)), None, lines, file
    return make(*arguments)


def reduced_class(reduced: Any, kind: type, *, outward: bool) -> object:
    """Reduce a class with its slots and qualified name.

    Args:
        outward: True in the trainer, whose classes replace those of workers. Otherwise a known class stays as it is.
    """
    if reduced is NotImplemented or len(reduced) < 3:
        return reduced
    make, arguments, (attributes, slots), *_ = reduced
    own, set_state = vars(kind), internals._class_setstate if outward else _set_new_state
    if issubclass(kind, enum.Enum):
        _check_members(kind)
    else:
        attributes["__qualname__"] = kind.__qualname__
        if "__slots__" in own and not issubclass(kind, tuple):  # tuples cannot have slots
            arguments[3]["__slots__"] = own["__slots__"]
            for name in [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]:
                attributes.pop(name, None)
    tracker = internals._get_or_create_tracker_id(kind)
    arguments = tuple(None if argument is tracker else argument for argument in arguments)  # tracked by `_class`
    return _class, (tracker, make, arguments), (attributes, slots), None, None, set_state


def _check_members(kind: type[enum.Enum]) -> None:
    """Raise TypeError if members are more than their values, which are all that cloudpickle sends."""
    mixed = vars(kind)["_member_type_"]
    for member in kind:
        is_made_otherwise = mixed is not object and "__new_member__" in vars(kind) and mixed(member.value) != member
        if is_made_otherwise or any(name[:1] != "_" or name[-1:] != "_" for name in vars(member)):  # not enum's own
            raise TypeError(f"{member!r} is more than its value, and cannot be sent: define {kind!r} in a module")


def _class(tracker: str, make: Callable[..., type], arguments: tuple[object, ...]) -> type:
    found: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if found is None:
        made = make(*arguments)
        _new.add(made)
        found = internals._lookup_class_or_track(tracker, made)
    return found


_new: weakref.WeakSet[type] = weakref.WeakSet()  # classes without a state so far


def _set_new_state(kind: type, state: tuple[dict[str, object], dict[str, object]]) -> None:
    """Ignore the state of a class that was known before: it may have changed since it was sent."""
    if kind in _new:
        _new.discard(kind)
        internals._class_setstate(kind, state)
