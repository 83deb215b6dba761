"""Pickling of classes and functions by value: cloudpickle's, corrected to match a fork."""

from __future__ import annotations

import contextlib
import enum
import importlib
import linecache
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle.cloudpickle as internals

Cells = dict[int, tuple[types.CellType, types.CellType]]
"""By the id of a closure cell: the cell, and the empty cell pickled in its place."""

_State = tuple[dict[str, object], dict[str, object], dict[str, dict[str, object]]]
"""State of a class: its attributes, its slots, and the attributes of its enum members."""

_SetState = Callable[[type, _State], None]

_FILE = 10  # index of the file name among the arguments of a code object


_modules: set[str] = set()  # modules that workers could not import
_lock = threading.Lock()
_packing = 0  # number of threads within `packing`
_lent: set[str] = set()  # modules added to cloudpickle's own list during `packing`
# Another thread may hold the lock during a fork. Forked workers need it to send batches.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def modules_by_value() -> set[str]:
    """Return the modules pickled by value: the user's in cloudpickle, and `send_by_value`'s."""
    return _modules.union(internals.list_registry_pickle_by_value())


def send_by_value(module: str) -> None:
    """Pickle a module's classes and functions by value from now on, in this package only."""
    _modules.add(module)


@contextlib.contextmanager
def packing() -> Iterator[None]:
    """Return a context in which cloudpickle's process-wide list has all modules by value."""
    global _packing
    listed: set[str] = internals._PICKLE_BY_VALUE_MODULES
    with _lock:
        _packing += 1
        new = _modules - listed
        listed.update(new)
        _lent.update(new)
    try:
        yield
    finally:
        with _lock:
            _packing -= 1
            if not _packing:
                listed.difference_update(_lent)
                _lent.clear()


_shared: weakref.WeakSet[type] = weakref.WeakSet()  # classes whose ids both sides of a fork know
_is_forked_worker = False


def share_classes() -> list[type]:
    """Give ids to the classes pickled by value, so that forks of this process can refer to them.

    Returns the classes. The caller keeps them alive for as long as its forks run.
    """
    by_value = {"__main__", *modules_by_value()}
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
    found: type = internals._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]
    return found


def has_modules() -> bool:
    """True if `packing` has any effect."""
    return bool(_modules)


def is_by_name(what: Callable[..., object]) -> bool:
    """True if a function or class is found by its name in a module that is not pickled by value."""
    module = sys.modules.get(getattr(what, "__module__", None) or "__main__")
    if module is None or module.__name__ in {"__main__", *modules_by_value()}:
        return False
    found: object = module
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
    """Reduce a class with its slots, qualified name and all members, not to be registered again.

    Args:
        outward: True in the trainer, whose classes replace those of workers. Otherwise a known class stays as it is.
    """
    if reduced is NotImplemented or len(reduced) < 3:
        return reduced
    _, arguments, (attributes, slots), *_ = reduced
    set_state = _set_state if outward else _set_new_state
    if issubclass(kind, enum.Enum):
        return _reduced_enum(reduced, kind, set_state)
    _, _, bases, namespace, tracker, _ = arguments
    own = vars(kind)
    if "__slots__" in own and not issubclass(kind, tuple):  # tuples cannot have slots
        namespace = {**namespace, "__slots__": own["__slots__"]}
        for name in [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]:
            attributes.pop(name, None)
    attributes["__qualname__"] = kind.__qualname__
    is_quiet = any("__init_subclass__" in vars(base) and not is_by_name(base) for base in kind.__mro__[1:])
    meta = next(base for base in type(kind).__mro__ if is_by_name(base))
    made = type(kind), meta, kind.__name__, bases, namespace, tracker, is_quiet
    return _class, made, (attributes, slots, {}), None, None, set_state


def _class(
    meta: type[type],
    known: type[type],
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, object],
    tracker: str,
    is_quiet: bool,
) -> type:
    """Return an empty class. Hooks of pickled classes do not run: their effects are pickled."""
    found: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if found is not None:
        return found
    namespace = {sys.intern(name): value for name, value in namespace.items()}
    with _quiet(types.resolve_bases(bases)) if is_quiet else contextlib.nullcontext():
        if meta is known:
            made = types.new_class(name, bases, {"metaclass": meta}, lambda own: own.update(namespace))
        else:
            made = known.__new__(meta, name, types.resolve_bases(bases), {"__orig_bases__": bases, **namespace})
    return _tracked(made, tracker)


def _tracked(made: type, tracker: str) -> type:
    _new.add(made)
    found: type = internals._lookup_class_or_track(tracker, made)
    return found


_new: weakref.WeakSet[type] = weakref.WeakSet()  # classes without a state so far


def _set_state(kind: type, state: _State) -> None:
    attributes, slots, members = state
    _new.discard(kind)
    internals._class_setstate(kind, (attributes, slots))
    for name, of_member in members.items():
        vars(kind.__members__[name]).update(of_member)  # type: ignore[attr-defined]


def _set_new_state(kind: type, state: _State) -> None:
    """Ignore the state of a class that was known before: it may have changed since it was sent."""
    if kind in _new:
        _set_state(kind, state)


@contextlib.contextmanager
def _quiet(bases: tuple[type, ...]) -> Iterator[None]:
    """Disable `__init_subclass__` of pickled classes in a context."""
    above = dict.fromkeys(base for direct in bases for base in direct.__mro__)
    travelled = internals._DYNAMIC_CLASS_TRACKER_BY_CLASS
    name = "__init_subclass__"
    hooks = {base: vars(base)[name] for base in above if name in vars(base) and base in travelled}
    try:
        for base in hooks:
            type.__setattr__(base, name, classmethod(_nothing))
        yield
    finally:
        for base, hook in hooks.items():
            type.__setattr__(base, name, hook)


def _nothing(kind: type) -> None: ...


def _reduced_enum(reduced: Any, kind: type[enum.Enum], set_state: _SetState) -> object:
    """Add the aliases of members, and the attributes set by a constructor."""
    mixed: type[Any] = vars(kind)["_member_type_"]
    if mixed is not object and "__new_member__" in vars(kind):
        for member in kind:
            if mixed(member.value) != member:
                raise TypeError(f"the members of {kind!r} are made by a __new__ of their own, of what is not known")
    make, (bases, name, qualname, _, module, tracker, more), (attributes, slots), *_ = reduced
    values, states = {}, {}
    for second, member in kind.__members__.items():
        attributes.pop(second, None)
        values[second] = member.value
        states[second] = {key: value for key, value in vars(member).items() if key not in _OF_MEMBERS}
    arguments = bases, name, qualname, values, module, None, more
    return _enum, (make, tracker, arguments), (attributes, slots, states), None, None, set_state


_OF_MEMBERS = {"_name_", "_value_", "_sort_order_", "__objclass__"}


def _enum(make: Callable[..., type], tracker: str, arguments: tuple[object, ...]) -> type:
    found: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    return _tracked(make(*arguments), tracker) if found is None else found
