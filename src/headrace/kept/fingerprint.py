"""What tells functions, and what they use, from others that may give something else: the same in every process.

A function is its byte code with its constants, its defaults, what it closes over, and the globals that it names: values
by what is in them, functions and classes of the user's own in the same way, and so on; what a library has under a name,
by the library's version. Other objects are what they would be pickled as. What cannot be told in this way is refused.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import importlib
import importlib.util
import marshal
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from headrace.functions import name_of
from headrace.kept.code import Outside, code_of
from headrace.kept.draws import drawn_by, is_drawn_from, is_generator
from headrace.kept.libraries import is_by_name, version_of

_LEAVES = {type(None), bool, int, float, complex, str, bytes}
_ODD_LEAVES = {type(...), type(NotImplemented), range}
_PLACES = types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType
_OF_CLASSES = {
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate_func__"),
    *("__annotations_cache__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"),
    *("__orig_bases__", "__parameters__", "__dataclass_fields__", "__dataclass_params__", "__match_args__"),
    *("__slots__", "__slotnames__", "__type_params__", "__classcell__"),
}
_LOOKING_UP = {
    *(("builtins", name) for name in ("__import__", "eval", "exec", "globals")),
    *(("importlib", "import_module"), ("sys", "modules")),
}
_LARGE_BYTES = 2**16
_LONG = 1000


class NotKnownError(Exception):
    """Nobody can tell what a function does; says what of it cannot be told."""


class ValueDigest:
    """Takes values in.

    Args:
        quickly: large arrays and long lists are looked at by their address alone: whoever asks soon again wants to know
            whether they are others, and not what is in them.

    Attributes:
        draws: what of all that makes random numbers, as far as that can be seen.
    """

    def __init__(self, *, quickly: bool = False) -> None:
        self._digest = hashlib.blake2b(digest_size=32)
        self._quickly = quickly
        self._seen: dict[int, tuple[int, object]] = {}  # the values too: the id of one that is gone may be another's
        self.draws: str | None = None

    def digest(self) -> bytes:
        """32 bytes, the same for what is the same."""
        return self._digest.digest()

    def add(self, value: Any) -> None:
        """Take in a value.

        Raises:
            NotKnownError: it cannot be told.
        """
        kind = type(value)
        if kind in _LEAVES:
            self._put(kind.__name__, marshal.dumps(value, 0))
        elif kind is tuple:
            self._each("tuple", value)
        elif kind in _ODD_LEAVES:
            self._put(kind.__name__, repr(value).encode())
        elif kind is set or kind is frozenset:
            self._put(kind.__name__, *sorted(map(self._alone, value)))
        elif id(value) in self._seen:
            self._put("again", b"%d" % self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_other(value, kind)

    def _add_other(self, value: Any, kind: type) -> None:
        add = _KINDS.get(kind)
        if add is not None:
            add(self, value)
        elif issubclass(kind, type):
            self._add_class(value)
        elif issubclass(kind, np.ndarray):
            self._add_array(value)
        elif any(f"{base.__module__}.{base.__qualname__}" == "torch.Tensor" for base in kind.__mro__):
            self._add_tensor(value)
        else:
            self._add_object(value, kind)

    def _put(self, kind: str, *parts: bytes) -> None:
        self._digest.update(b"%b %d" % (kind.encode(), len(parts)))
        for part in parts:
            self._digest.update(b" %d:" % len(part))
            self._digest.update(part)

    def _each(self, kind: str, values: Any) -> None:
        self._put(kind, b"%d" % len(values))
        if set(map(type, values)) <= _LEAVES:  # of which there may be millions
            self._digest.update(marshal.dumps(tuple(values), 0))
            return
        for value in values:
            self.add(value)

    def _alone(self, value: object) -> bytes:
        one = ValueDigest(quickly=self._quickly)
        one.add(value)
        self.draws = self.draws or one.draws
        return one.digest()

    def _add_list(self, value: list[Any]) -> None:
        if self._quickly and len(value) > _LONG:
            self._put("list at", b"%d %d" % (id(value), len(value)))
        else:
            self._each("list", value)

    def _add_dict(self, value: dict[Any, Any]) -> None:
        self._each("keys", tuple(value))
        self._add_list(list(value.values()))

    def _add_function(self, function: types.FunctionType) -> None:
        if is_by_name(function, function.__module__, function.__qualname__):
            self._add_name(function.__module__, function.__qualname__)
            return
        code = code_of(function.__code__)
        self._put("function", code.digest)
        if code.draws is not None:
            self._draw(f"{name_of(function)}, which uses {code.draws}")
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # it has none yet
                self._put("empty")
        own = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
        if own:
            self.add(own)
        for outside in code.outside:
            if outside.imported is None:
                self._add_global(outside, function)
            else:
                self._add_import(outside, function)

    def _add_global(self, outside: Outside, function: types.FunctionType) -> None:
        name, values = outside.name, (function.__globals__, vars(sys.modules["builtins"]))
        value = next((some[name] for some in values if name in some), NotImplemented)
        self._put("global", name.encode())
        attributes = list(outside.attributes)
        while isinstance(value, types.ModuleType):
            version = version_of(value.__name__)
            if not attributes:
                if version is None:
                    why = f"{name_of(function)} uses the module {value.__name__} other than by a name in it"
                    raise NotKnownError(why)
                self._add_name(value.__name__, "")
                return
            attribute = attributes.pop(0)
            found = getattr(value, attribute, NotImplemented)
            if version is not None and not isinstance(found, types.ModuleType):
                self._add_name(value.__name__, attribute)
                return
            self._put("attribute", attribute.encode())
            value = found
        self.add(value)

    def _add_import(self, outside: Outside, function: types.FunctionType) -> None:
        """What a function imports when it is called."""
        name = "." * outside.level + outside.name
        try:
            package = function.__globals__.get("__package__")
            name = importlib.util.resolve_name(name, package) if outside.level else name
            module = importlib.import_module(name)
        except ImportError:
            self._put("no module", name.encode())
            return
        for attribute in outside.imported or ("",):
            value = _imported(module, attribute) if attribute else module
            if isinstance(value, types.ModuleType):
                if version_of(value.__name__) is None:
                    what = f"{name_of(function)} imports {value.__name__} when it is called"
                    raise NotKnownError(f"{what}; import it at the top of its file")
                self._add_name(value.__name__, "")
            elif version_of(name) is not None:
                self._add_name(name, attribute)
            else:
                self.add(value)

    def _add_name(self, module: str, name: str) -> None:
        """What a library has under a name; the library itself without one."""
        if (module, name) in _LOOKING_UP:
            raise NotKnownError(f"what is found by {name} of {module}, which takes the names of what is used as texts")
        self._put("of a library", module.encode(), name.encode(), (version_of(module) or "").encode())
        if is_drawn_from(module, name) or (not name and module in ("random", "numpy.random", "secrets")):
            self._draw(f"{module}.{name}".rstrip("."))

    def _draw(self, what: str) -> None:
        self.draws = self.draws or what

    def _add_method(self, method: types.MethodType) -> None:
        self._put("method")
        self.add(method.__func__)
        self.add(method.__self__)

    def _add_built_in(self, function: Any) -> None:
        """A function in C: a library's, or a method of an object."""
        if is_by_name(function, "torch", function.__name__):
            self._add_name("torch", function.__name__)
            return
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            module = getattr(owner, "__name__", None) or getattr(function, "__module__", None)
            module = module or function.__objclass__.__module__
            if version_of(module) is None:
                raise NotKnownError(f"{function!r} is a function in C of no library that says its version")
            self._add_name(module, function.__qualname__)
            return
        self._put("method of", function.__name__.encode())
        self.add(owner)

    def _add_module(self, module: types.ModuleType) -> None:
        if version_of(module.__name__) is None:
            raise NotKnownError(f"the module {module.__name__} as a whole")
        self._add_name(module.__name__, "")

    def _add_class(self, kind: type) -> None:
        if is_by_name(kind, kind.__module__, kind.__qualname__):
            self._add_name(kind.__module__, kind.__qualname__)
            return
        self._put("class", kind.__module__.encode(), kind.__qualname__.encode())  # pickles name it
        self._each("bases", kind.__bases__)
        self.add(type(kind))
        if issubclass(kind, enum.Enum):
            for name, member in kind.__members__.items():
                own = {name: value for name, value in vars(member).items() if not name.startswith("_")}
                self.add((name, member.value, own))
        members = {name: value for name, value in vars(kind).items() if name not in _OF_CLASSES}
        for name, value in sorted(members.items()):
            if issubclass(kind, enum.Enum) and (name in kind.__members__ or _is_of_enums(name, value)):
                continue
            self._put("member", name.encode())
            if type(value) is not types.MemberDescriptorType:
                self.add(value)

    def _add_wrapped(self, value: Any) -> None:
        """What has a function in it: a property, a static method, a function that remembers what it gave."""
        self._put(type(value).__name__)
        for name in ("fget", "fset", "fdel", "__func__", "func", "__wrapped__"):
            if (inner := getattr(value, name, None)) is not None:
                self.add(inner)

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        self._put(type(array).__qualname__, repr(array.dtype).encode(), repr(array.shape).encode())
        if isinstance(array, np.ma.MaskedArray):
            self.add((np.ma.getmaskarray(array), array.fill_value))
        elif version_of(type(array).__module__) is None:
            self.add((type(array), getattr(array, "__dict__", None)))
        if array.dtype.hasobject:
            self._add_list(array.ravel().tolist())
        elif self._quickly and array.nbytes > _LARGE_BYTES:
            self._put("at", b"%d" % id(array))
        else:
            self._digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _add_tensor(self, tensor: Any) -> None:
        self._put("tensor", repr((tensor.dtype, tuple(tensor.shape), str(tensor.layout))).encode())
        self.add((type(tensor), vars(tensor)))
        if self._quickly and tensor.nbytes > _LARGE_BYTES:
            self._put("at", b"%d" % id(tensor))
            return
        import torch

        plain = tensor.detach().cpu().as_subclass(torch.Tensor).to_dense().contiguous().reshape(-1)
        self._digest.update(plain.view(torch.uint8).numpy().data)

    def _add_object(self, value: Any, kind: type) -> None:
        """Any other object: as pickle would take it apart."""
        if is_generator(kind):
            self._draw(f"{kind.__module__}.{kind.__qualname__}")
        elif version_of(kind.__module__) is not None and (what := drawn_by(kind)) is not None:
            self._draw(what)
        fingerprint = getattr(value, "_fingerprint", None)
        if type(fingerprint) is str and kind.__module__.startswith("datasets."):  # Hugging Face's knows its own
            self._put("data set", kind.__qualname__.encode(), fingerprint.encode())
            return
        reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(kind)
        reduced: Any
        try:
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:
            raise NotKnownError(f"{kind.__qualname__} cannot be taken apart: {error}") from error
        if type(reduced) is str:
            if not is_by_name(value, getattr(value, "__module__", None) or kind.__module__, reduced):
                raise NotKnownError(f"{kind.__qualname__} says no more of itself than that it is {reduced}")
            self._add_name(getattr(value, "__module__", None) or kind.__module__, reduced)
            return
        made, arguments, state, items, pairs = (tuple(reduced) + (None,) * 3)[:5]
        self._put("object")
        for part in (kind, made, arguments, state, list(items or ()), [one for pair in pairs or () for one in pair]):
            self.add(part)


def _imported(module: types.ModuleType, name: str) -> Any:
    """The object that `from module import name` gives, also a submodule that was not imported yet."""
    if not hasattr(module, name):
        with suppress(ImportError):
            return importlib.import_module(f"{module.__name__}.{name}")
    return getattr(module, name, NotImplemented)


def _is_of_enums(name: str, value: object) -> bool:
    """Whether it is what enumerations have for themselves: not what follows from the members, and not a function."""
    functions = types.FunctionType, classmethod, staticmethod
    return name.startswith("_") and name.endswith("_") and name[1] != "_" and not isinstance(value, functions)


_KINDS: dict[type, Callable[[ValueDigest, Any], None]] = {
    list: ValueDigest._add_list,
    dict: ValueDigest._add_dict,
    bytearray: lambda self, value: self._put("bytearray", bytes(value)),
    types.FunctionType: ValueDigest._add_function,
    types.MethodType: ValueDigest._add_method,
    types.ModuleType: ValueDigest._add_module,
    types.MappingProxyType: lambda self, value: self._add_dict(dict(value)),
    **dict.fromkeys(_PLACES, ValueDigest._add_built_in),
    **dict.fromkeys(
        (property, staticmethod, classmethod, functools.cached_property, type(functools.lru_cache(len))),
        ValueDigest._add_wrapped,
    ),
}
