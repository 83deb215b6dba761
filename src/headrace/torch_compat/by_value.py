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
_has_script = False


def begin_worker() -> None:
    """Declare that this process has the trainer's script, as a fork has, and sends to the trainer only."""
    global _has_script
    _has_script = True


def trainer_has(what: Any) -> bool:
    """True in such a worker for functions and classes that the trainer finds by name, in its script too."""
    return _has_script and _is_found(what)


def modules_by_value() -> set[str]:
    """Return the modules that workers cannot import: the script, and those registered in cloudpickle."""
    return {"__main__", *internals.list_registry_pickle_by_value()}


def is_by_name(what: Callable[..., object]) -> bool:
    """True if a function or class is found by its name in a module that is not pickled by value."""
    return what.__module__ not in modules_by_value() and _is_found(what)


def _is_found(what: Callable[..., object]) -> bool:
    found: object = sys.modules.get(what.__module__ or "__main__")
    for name in what.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is what


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
    if not issubclass(kind, enum.Enum):
        attributes["__qualname__"] = kind.__qualname__
        if "__slots__" in own and not issubclass(kind, tuple):  # tuples cannot have slots
            arguments[3]["__slots__"] = own["__slots__"]
            for name in [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]:
                attributes.pop(name, None)
    tracker = internals._get_or_create_tracker_id(kind)
    return _class, (tracker, make, arguments), (attributes, slots), None, None, set_state


def _class(tracker: str, make: Callable[..., type], arguments: tuple[object, ...]) -> type:
    found: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if found is None:
        found = make(*arguments)
        _new.add(found)
    return found


_new: weakref.WeakSet[type] = weakref.WeakSet()  # classes without a state so far


def _set_new_state(kind: type, state: tuple[dict[str, object], dict[str, object]]) -> None:
    """Ignore the state of a class that was known before: it may have changed since it was sent."""
    if kind in _new:
        _new.discard(kind)
        internals._class_setstate(kind, state)
