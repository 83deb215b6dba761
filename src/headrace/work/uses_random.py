"""Which of the process's global random number generators a user's function may draw from.

Setting all three for each sample costs more than many functions do, so what a function can reach is looked at once. The
rule is a closed world: a function is understood if all that its code names, holds and can be given is understood, and
only what is understood can come out of it then. Whatever is not, counts as drawing from all of them:

* functions written in C, unless listed here; types written in C; classes with a metaclass or with slots,
* imports, assignments to globals, class definitions in a function; modules that are used other than as `module.name`,
* `getattr`, `eval`, `globals` and their like, and names such as `__globals__` or `tb_frame`, which lead anywhere,
* samples that hold anything but numbers, text, bytes and arrays: what their methods do nobody can tell.
"""

from __future__ import annotations

import dis
import functools
import importlib
import random
import re
import struct
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any

import numpy as np

from headrace.lately import torch_is_loaded
from headrace.work.randomness import EVERY_GENERATOR, rng

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not one of C's static types
_LOOKED_AT_MOST = 500  # values, for one function

_LEAVES = {*np.ScalarType, type(None), type(...), bytearray, range} - {np.object_, np.void}
_ONLY_DATA = {re.Pattern, struct.Struct}  # and what their methods give is data, too
_LISTS = {list, tuple, set, frozenset}
_PARTS_AT_MOST = 64  # of one container in a sample
_NESTED_AT_MOST = 3

_WHOLLY_HARMLESS = (
    *("base64", "binascii", "cmath", "collections", "datetime", "io", "itertools", "json", "math", "re", "struct"),
    *("time", "zlib"),
)
# Modules whose functions and types draw from no generator, and call nothing but what they are given; and what is
# nevertheless not understood: it looks up names, runs text or pickles, or writes to a stream of unknown kind.
_HARMLESS_MODULES = {
    "builtins": "getattr setattr delattr eval exec compile globals locals vars breakpoint input print type",
    "operator": "attrgetter methodcaller",
    "numpy": "load test",
    **dict.fromkeys(("numpy.linalg", "numpy.fft"), "test"),
    **dict.fromkeys(_WHOLLY_HARMLESS, ""),
}
_INTROSPECTION = {
    *("gi_frame", "cr_frame", "ag_frame", "tb_frame", "f_globals", "f_locals", "f_builtins", "f_back"),
    *("obj", "base", "metadata"),  # of memory, arrays and types of elements: any object at all
}
_KNOWN_SPECIAL_NAMES = {"__call__", "__getitem__", "__len__", "__iter__", "__next__", "__enter__", "__exit__"}
# What makes instances, of which one that exists is none the wiser.
_OF_CONSTRUCTION = {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__set_name__"}
_OF_DECLARATION = {
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__orig_bases__", "__parameters__",
}  # fmt: skip


def generators_of(function: object) -> frozenset[str]:
    """Those of "random", "numpy" and "torch" that a call of `function` with a plain sample may draw from."""
    look = _Look()
    try:
        look.at(function)
    except Exception:  # also one that odd objects raise while they are looked at
        return EVERY_GENERATOR
    return frozenset(look.found)


def is_plain(sample: Any, depth: int = _NESTED_AT_MOST) -> bool:
    """Whether a sample holds nothing but numbers, text, bytes and arrays of numbers, in few containers."""
    kind = type(sample)
    if kind in _LEAVES:
        return True
    if kind is np.ndarray:
        return not sample.dtype.hasobject
    if depth == 0 or (kind is not dict and kind not in _LISTS) or len(sample) > _PARTS_AT_MOST:
        return False
    if kind is not dict:
        return all(is_plain(part, depth - 1) for part in sample)
    for key, part in sample.items():  # most are of leaves, for which a call would cost more than the question
        if type(key) not in _LEAVES or (type(part) not in _LEAVES and not is_plain(part, depth - 1)):
            return False
    return True


def are_leaves(kinds: set[type]) -> bool:
    """Whether samples of these types hold nothing else."""
    return kinds <= _LEAVES


class _NotUnderstoodError(Exception):
    pass


class _Look:
    """Goes through all that a function can reach.

    Attributes:
        found: the generators met so far.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._seen: dict[int, object] = {}  # the values too: the number of one that is gone may be another's

    def at(self, value: Any) -> None:
        """Look at a value that the function may use.

        Raises:
            _NotUnderstoodError: it may lead anywhere.
        """
        kind = type(value)
        if kind in _LEAVES or kind in _ONLY_DATA or id(value) in self._seen or id(value) in _harmless():
            return
        self._seen[id(value)] = value
        if len(self._seen) > _LOOKED_AT_MOST:
            raise _NotUnderstoodError
        if kind in _LISTS:
            self._at_each(value)
        elif kind is dict:
            self._at_each(value.keys())
            self._at_each(value.values())
        elif kind is types.FunctionType:
            self._at_function(value)
        elif kind is types.MethodType:
            self._at_method(value)
        elif kind is functools.partial:
            self._at_each((value.func, value.args, value.keywords, vars(value)))
        elif kind is staticmethod or kind is classmethod:
            self._at_each((value.__func__, vars(value)))
        elif kind is property:
            self._at_each((value.fget, value.fset, value.fdel))
        elif kind is type:
            self._at_class(value)
        elif kind is types.BuiltinFunctionType:
            self._at_builtin(value)
        elif issubclass(kind, np.ndarray | np.dtype):
            self._at_numbers(value)
        elif not self._has_random_numbers(value, kind):
            self._at_instance(value, kind)

    def _at_each(self, values: Iterable[object]) -> None:
        if not set(map(type, values)) <= _LEAVES:  # lists of a million names are common
            for value in values:
                self.at(value)

    def _at_function(self, function: types.FunctionType) -> None:
        self._at_each((function.__defaults__, function.__kwdefaults__, vars(function)))
        for cell in function.__closure__ or ():
            self.at(cell.cell_contents)
        self._at_code(function.__code__, function)

    def _at_code(self, code: types.CodeType, function: types.FunctionType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._at_code(constant, function)
        instructions = [found for found in dis.get_instructions(code) if found.opname != "EXTENDED_ARG"]
        numbers = iter(range(len(instructions)))
        for k in numbers:
            name, operation = instructions[k].argval, instructions[k].opname
            if operation == "LOAD_GLOBAL":
                value = _global(name, function)
                while isinstance(value, types.ModuleType):
                    following = instructions[next(numbers)]
                    if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                        raise _NotUnderstoodError
                    value = self._attribute(value, following.argval)
                self.at(value)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR"):
                is_special = name.startswith("__") and name.endswith("__") and name not in _KNOWN_SPECIAL_NAMES
                if is_special or name in _INTROSPECTION:
                    raise _NotUnderstoodError
            elif instructions[k].opcode in dis.hasname or operation in ("LOAD_BUILD_CLASS", "MATCH_CLASS"):
                raise _NotUnderstoodError

    def _attribute(self, module: types.ModuleType, name: str) -> object:
        """What a module has under a name; None where it is a generator's and nothing else needs to be known of it."""
        if module is sys.modules["headrace"]:
            return getattr(module, name)  # loaded when it is first asked for
        if type(module) is not types.ModuleType or name not in vars(module) or name.startswith("__"):
            raise _NotUnderstoodError
        value = vars(module)[name]
        if isinstance(value, types.ModuleType):
            return value
        if module is random:
            self.found.add("random")
            return None
        if module is np.random:
            self.found.add("numpy")
            return None
        if module is sys.modules.get("torch") and type(value) is types.BuiltinFunctionType:
            self.found.add("torch")
            return None
        return value

    def _at_method(self, method: types.MethodType) -> None:
        owner = type(method.__self__)
        is_numpys = owner is np.random.RandomState and vars(owner).get(method.__name__) is method.__func__
        self._at_each((method.__self__,) if is_numpys else (method.__self__, method.__func__))

    def _at_builtin(self, function: types.BuiltinFunctionType) -> None:
        """A function that is not listed: where it is an object's method, what it does is up to that."""
        if isinstance(function.__self__, types.ModuleType | None) or function.__name__.startswith("__"):
            raise _NotUnderstoodError
        self.at(function.__self__)

    def _at_numbers(self, value: Any) -> None:
        is_array = isinstance(value, np.ndarray)
        if (is_array and type(value) is not np.ndarray) or (value.dtype if is_array else value).hasobject:
            raise _NotUnderstoodError

    def _has_random_numbers(self, value: object, kind: type) -> bool:
        """Whether it is a generator, or a word of torch's; notes whose."""
        if kind is random.Random:
            self.found |= {"random"} if value is random.seed.__self__ else set()  # type: ignore[attr-defined]
            return True
        if kind is np.random.RandomState or kind is np.random.Generator:
            self.found.add("numpy")  # one's own may share the bits of the global one
            return True
        torch = sys.modules.get("torch")
        if torch is not None and kind in (torch.dtype, torch.device, torch.Generator):
            self.found.add("torch")
            return True
        return False

    def _at_class(self, found: type) -> None:
        for base in found.__mro__:
            if id(base) not in _harmless():
                self._at_namespace(base)

    def _at_instance(self, value: object, kind: type) -> None:
        for base in kind.__mro__ if not _is_ours(kind) else ():
            if id(base) not in _harmless():
                self._at_namespace(base, instance_of=kind)
            elif base not in _bases():
                raise _NotUnderstoodError  # what such a container holds is not seen
        self.at(object.__getattribute__(value, "__dict__"))

    def _at_namespace(self, found: type, instance_of: type | None = None) -> None:
        """Look at what a class defines; for an instance that exists, what makes others is left out if none can be."""
        if type(found) is not type or not found.__flags__ & _HEAP_TYPE:
            raise _NotUnderstoodError
        for name, value in vars(found).items():
            if name == "__get__":
                raise _NotUnderstoodError  # it is handed the class that it is found in
            if instance_of is not None and type(value) is classmethod:
                self.at(instance_of)  # and so is this
            is_own = isinstance(value, types.GetSetDescriptorType) and name in ("__dict__", "__weakref__")
            is_left_out = instance_of is not None and name in _OF_CONSTRUCTION
            if name not in _OF_DECLARATION and not is_own and not is_left_out:
                self.at(value)


def _global(name: str, function: Any) -> Any:
    for names in (function.__globals__, function.__builtins__):
        if type(names) is not dict:
            raise _NotUnderstoodError
        if name in names:
            return names[name]
    raise _NotUnderstoodError  # it may be there when it is called


def _bases() -> tuple[type, ...]:
    """Classes that hold nothing of their own, and whose methods are harmless."""
    return _bases_with_torchs() if torch_is_loaded() else (object, typing.Generic)


@functools.cache
def _bases_with_torchs() -> tuple[type, ...]:
    from torch.utils.data import Dataset

    return object, typing.Generic, Dataset


def _is_ours(kind: type) -> bool:
    """Whether it is an operator of ours, which draws nothing itself: only what it holds matters."""
    module = sys.modules.get("headrace.datasets.operators.fields")
    return module is not None and vars(module).get(kind.__name__) is kind


def _harmless() -> dict[int, object]:
    """By their ids, functions and types of which all is known that matters here."""
    return _harmless_beside(_bases())


@functools.cache
def _harmless_beside(bases: tuple[type, ...]) -> dict[int, object]:
    found: list[object] = [rng, functools.partial, functools.reduce, *bases]
    for name, denied in _HARMLESS_MODULES.items():
        names = vars(importlib.import_module(name))
        found += [value for n, value in names.items() if n[0] != "_" and n not in denied.split() and callable(value)]
    return {id(value): value for value in found}
