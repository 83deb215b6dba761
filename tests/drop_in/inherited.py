"""A user's script: what its data sets hold, and what workers say of it, with torch's loader and with ours.

It prints one line of JSON for each case: its name, what a fork of torch's says, what a worker of ours says.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import json
import logging
import operator
import os
import random
import re
import sys
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import headrace as hr

Case = tuple[Any, Callable[[Any], Any]]
CASES: dict[str, Callable[[], Case]] = {}
KEPT: list[Any] = []  # by the script alone
CALLS: list[Any] = []


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """One thing that a data set holds, and what is asked of it in a worker."""
    CASES[make.__name__] = make
    return make


# Functions that remember.


@functools.lru_cache(maxsize=2)
def cached(x: int) -> int:
    return x * 2


@functools.cache
def cached_for_good(x: int) -> int:
    return x * 3


class Loads:
    def __init__(self, base: int) -> None:
        self.base = base

    @functools.lru_cache(maxsize=8)  # noqa: B019 (as users write it)
    def load(self, x: int) -> int:
        return self.base + x

    @staticmethod
    @functools.lru_cache
    def static(x: int) -> int:
        return x + 1

    @classmethod
    @functools.cache
    def of_class(cls, x: int) -> Any:
        return cls.__name__, x

    @functools.cached_property
    def heavy(self) -> list[int]:
        CALLS.append("heavy")
        return [self.base] * 3

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "any"

    @kind.register
    def _(self, value: int) -> str:
        return "int"

    double = functools.partialmethod(lambda self, f, x: (self.base, f, x), 2)


@case
def lru_cached_function() -> Case:
    cached(1)
    return cached, lambda f: (f(1), f(1), f.cache_parameters(), f.__name__, f is cached, f.__wrapped__(4))


@case
def cached_function() -> Case:
    return cached_for_good, lambda f: (f(2), f(2), f.cache_info().hits, f is cached_for_good)


@case
def recursive_cached_local_function() -> Case:
    @functools.cache
    def sums(n: int) -> int:
        return n and n + sums(n - 1)

    return sums, lambda f: (f(40), f.cache_info().currsize)


@case
def cached_methods() -> Case:
    loads = Loads(3)
    return loads, lambda o: (o.load(1), o.static(1), o.of_class(2), type(o).load.cache_parameters(), type(o) is Loads)


@case
def cached_property_that_was_asked() -> Case:
    loads = Loads(3)
    assert loads.heavy
    return loads, lambda o: (o.heavy, "heavy" in vars(o), CALLS)


@case
def cached_property_that_was_not_asked() -> Case:
    return Loads(4), lambda o: ("heavy" in vars(o), o.heavy, o.heavy is o.heavy, type(o).heavy.attrname, CALLS)


# Functions that are chosen.


class Mine:
    pass


@functools.singledispatch
def show(_: Any) -> str:
    return "object"


@show.register
def _(_: int) -> str:
    return "int"


show.register(list, lambda _: "list")
show.register(Mine, lambda _: "mine")


@case
def singledispatch() -> Case:
    kinds: list[Any] = [1, [], 2.0, Mine(), True]
    return show, lambda f: ([f(x) for x in kinds], sorted(k.__name__ for k in f.registry), f.dispatch(bool)(True))


@case
def singledispatch_that_learns_in_the_worker() -> Case:
    def ask(f: Any) -> Any:
        f.register(str, lambda _: "text")
        return f("a"), str in f.registry, show("a")

    return show, ask


@case
def singledispatchmethod_and_partialmethod() -> Case:
    return Loads(1), lambda o: (o.kind(1), o.kind("x"), o.double(7))


# Data sets that pass on what they are asked.


class Inner:
    def __init__(self) -> None:
        self.values = list(range(10))

    def __len__(self) -> int:
        return len(self.values)

    def __getnewargs_ex__(self) -> Any:
        return (), {}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class InnerReduces(Inner):
    def __reduce__(self) -> Any:
        return InnerReduces, ()


class Passes:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PassesFromSlot:
    __slots__ = ("empty", "inner")

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PassesFromDict:
    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)  # a KeyError where it is made anew

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["inner"], name, value)


class PassesFirst:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        try:
            return super().__getattribute__(name)
        except AttributeError:
            return getattr(super().__getattribute__("inner"), name)


class HasEverything(Passes):
    def __getattr__(self, name: str) -> Any:
        inner = self.inner
        return lambda *args: (name, len(inner), args)


class PassesWithState(Passes):
    def __getstate__(self) -> Any:
        return {**self.__dict__, "added": True}


class Dotted(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class DottedList(list[Any]):
    def __getattr__(self, name: str) -> Any:
        return self[0][name]


def _passing(outer: type[Any], inner: type[Any]) -> Callable[[], Case]:
    return lambda: (outer(inner()), lambda o: (type(o).__name__, type(o.inner).__name__, len(o.inner), o.values))


for _outer in (Passes, PassesFromSlot, PassesFromDict, PassesFirst):
    for _inner in (Inner, InnerReduces):
        CASES[f"{_outer.__name__}_{_inner.__name__}"] = _passing(_outer, _inner)


@case
def passing_on_twice() -> Case:
    return Passes(PassesFromDict(Passes(Inner()))), lambda o: (o.values, type(o.inner.inner).__name__)


@case
def passing_on_with_a_state_of_its_own() -> Case:
    return PassesWithState(Inner()), lambda o: o.values


@case
def answers_to_everything() -> Case:
    return HasEverything(Inner()), lambda o: o.values(1)


@case
def containers_with_dots() -> Case:
    return (Dotted(a=1), DottedList([{"b": 2}])), lambda t: (t[0].a, t[0], t[1].b, t[1])


# torch's and numpy's.


@case
def storages() -> Case:
    numbers = torch.arange(5, dtype=torch.int32)
    typed = torch.arange(4, dtype=torch.float64).storage()

    def ask(stored: Any) -> Any:
        untyped, typed = stored
        return untyped.nbytes(), torch.empty(0, dtype=torch.int32).set_(untyped).tolist(), typed.dtype, typed.tolist()

    return (numbers.untyped_storage(), typed), ask


@case
def shared_storage() -> Case:
    shared = torch.zeros(3, dtype=torch.uint8).share_memory_()

    def ask(storage: Any) -> Any:
        storage[0] = 7
        return storage.is_shared(), list(storage)

    return shared.untyped_storage(), ask


@case
def generators() -> Case:
    drawn = torch.Generator().manual_seed(5)
    torch.rand(3, generator=drawn)
    several = (drawn, np.random.default_rng(3), np.random.RandomState(4), random.Random(5))
    return several, lambda g: (torch.rand(2, generator=g[0]).tolist(), g[1].random(), g[2].rand(), g[3].random())


@case
def torchs_small_things() -> Case:
    things = (torch.float32, torch.device("cpu"), torch.Size([2]), torch.finfo(torch.float16), torch.iinfo(torch.int8))
    return things, repr


@case
def tensor_with_an_attribute() -> Case:
    tensor: Any = torch.ones(2)
    tensor.tag = "a"
    return tensor, lambda t: (t.tolist(), t.tag)


@case
def module_with_a_hook() -> Case:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    module.register_forward_hook(lambda *_: None)
    return module, lambda m: (m.weight.tolist(), type(m.weight).__name__, len(m._forward_hooks))


@case
def records_of_numpy() -> Case:
    records = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]).view(np.recarray)
    return (records, np.ma.array([1, 2], mask=[0, 1])), lambda r: (repr(r), r[0].a.tolist())


# Python's.


@case
def logger_pattern_module_and_methods() -> Case:
    log = logging.getLogger("a.log")
    items = [1, 2]
    things: Any = (log, re.compile(r"(\d+)"), json, torch.nn.functional, items.append, {"a": 1}.get, "x,y".split, items)

    def ask(t: Any) -> Any:
        t[4](5)
        same = t[0] is logging.getLogger("a.log"), t[2] is json, t[3] is torch.nn.functional
        return same, t[1].findall("a1b22"), t[5]("a"), t[6](","), t[7]

    return things, ask


@case
def views_and_iterators_of_containers() -> Case:
    table = {"a": 1, "b": 2}
    begun, count = iter([1, 2, 3]), itertools.count(5)
    next(begun), next(count)
    return (table.keys(), table.items(), begun, count, range(3)), lambda t: (*map(list, t[:3]), next(t[3]), t[4])


@case
def read_only_view_of_a_dict_that_changes() -> Case:
    table = {"a": 1}

    def ask(t: Any) -> Any:
        t[0]["b"] = 2
        return dict(t[1])

    return (table, types.MappingProxyType(table)), ask


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=3)
UNSET: contextvars.ContextVar[int] = contextvars.ContextVar("UNSET")


@case
def context_variables() -> Case:
    VARIABLE.set(8)

    def ask(variable: Any) -> Any:
        told = (
            variable is VARIABLE,
            variable.name,
            variable.get(),
            UNSET.get(0),
            contextvars.Context().run(variable.get),
        )
        with contextlib.suppress(LookupError):
            return told, UNSET.get()
        return told

    return VARIABLE, ask


@case
def environment() -> Case:
    return os.environ, lambda e: (e is os.environ, "PYTHONHASHSEED" in e)


class OwnError(ValueError):
    def __init__(self, first: int, *, second: int) -> None:
        super().__init__(f"{first} {second}")
        self.first, self.second = first, second


class OwnFileError(FileNotFoundError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "not there", name)


@case
def exceptions() -> Case:
    error = OwnError(1, second=2)
    error.add_note("noted")
    return (error, OwnFileError("x")), lambda t: (
        *(str(t[0]), t[0].second, t[0].__notes__, type(t[0]) is OwnError),
        *(str(t[1]), t[1].errno, t[1].filename, type(t[1]) is OwnFileError),
    )


# Weak references.


class Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.parent: Any = None

    def call(self) -> str:
        return self.name


@case
def weak_reference_to_what_travels_too() -> Case:
    child, parent = Node("child"), Node("parent")
    child.parent = weakref.ref(parent)
    return (child, parent), lambda t: (t[0].parent() is t[1], weakref.getweakrefcount(t[1]))


@case
def weak_reference_to_what_the_script_alone_holds() -> Case:
    KEPT.append(Node("kept"))
    return (weakref.ref(KEPT[-1]), weakref.WeakMethod(KEPT[-1].call)), lambda t: (t[0]().name, t[1]()())


@case
def weak_reference_that_is_dead() -> Case:
    return weakref.ref(Node("gone")), lambda r: r()


@case
def weak_reference_whose_target_is_let_go_of_in_the_worker() -> Case:
    held = [Node("held")]

    def ask(t: Any) -> Any:
        t[1].clear()
        return t[0]() is None

    return (weakref.ref(held[0]), held), ask


@case
def weak_containers() -> Case:
    node = Node("n")
    weak = weakref.WeakSet([node]), weakref.WeakValueDictionary(a=node), weakref.WeakKeyDictionary({node: 1})

    def ask(t: Any) -> Any:
        node, (members, values, keys) = t
        told = list(members) == [node], dict(values) == {"a": node}, dict(keys) == {node: 1}
        t[0] = node = None
        return told, len(members), len(values), len(keys)

    return [node, weak], ask


# Classes of the script.


class Color(enum.Enum):
    RED = 1
    BLUE = "b"
    CRIMSON = 1  # noqa: PIE796 (as users write it)

    @property
    def lower(self) -> str:
        return self.name.lower()


class Planet(enum.Enum):
    EARTH = (5.97, 6.37)
    MARS = (0.64, 3.39)

    def __init__(self, mass: float, radius: float) -> None:
        self.mass, self.radius = mass, radius


class Parts(enum.IntFlag):
    A = 1
    B = 2
    BOTH = 3


class Mode(enum.StrEnum):
    TRAIN = enum.auto()


@case
def enums() -> Case:
    return (Color.RED, Planet.MARS, Parts.A, Mode.TRAIN, Color), lambda t: (
        *(t[0] is Color.RED, t[0].lower, list(t[4]), t[4]("b"), t[4].CRIMSON, t[4]["CRIMSON"]),
        *(t[1].mass, t[1].value, Planet((5.97, 6.37)).radius),
        *(t[0] is t[4](1), t[2] | Parts.B, Parts.BOTH, Parts["BOTH"], t[3] == "train", f"{t[3]}"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Config:
    name: str
    kinds: typing.ClassVar[list[int]] = [1]


@case
def dataclasses_of_the_script() -> Case:
    return (Point(1), Config("a")), lambda t: (
        *(repr(t[0]), dataclasses.asdict(t[1]), dataclasses.replace(t[0], x=3) == Point(3), t[1].kinds),
        *([f.name for f in dataclasses.fields(t[0])], hasattr(t[0], "__dict__")),
    )


class Pair(typing.NamedTuple):
    a: int
    b: str = "x"

    def both(self) -> Any:
        return self.a, self.b


OldPair = collections.namedtuple("OldPair", "a b")  # noqa: PYI024 (as users write it)


@case
def named_tuples() -> Case:
    return (Pair(1), OldPair(1, 2)), lambda t: (t[0].both(), t[0]._fields, t[1]._replace(a=5), type(t[0]) is Pair)


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> int: ...


class Square(Shape):
    def area(self) -> int:
        return 4

    def told(self) -> str:
        return super().__repr__()[:19] + __class__.__name__  # type: ignore[name-defined]


@typing.runtime_checkable
class HasArea(typing.Protocol):
    def area(self) -> int: ...


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


Shape.register(Mine)


@case
def abstract_protocol_and_generic_classes() -> Case:
    def ask(t: Any) -> Any:
        try:
            made: Any = Shape()  # type: ignore[abstract]
        except TypeError:
            made = None
        are = isinstance(t[0], Shape), isinstance(Mine(), Shape), isinstance(t[0], t[1]), issubclass(int, t[1])
        return t[0].area(), t[0].told(), made, are, t[2].value, t[2].__orig_class__ == Box[int], t[3] is T

    return (Square(), HasArea, Box[int](3), T), ask


class Slotted:
    __slots__ = ("__hidden", "__weakref__", "_b", "a")

    def __init__(self) -> None:
        self.a, self._b, self.__hidden = 1, 2, 3

    def hidden(self) -> int:
        return self.__hidden


class SlottedMore(Slotted):
    __slots__ = ("__dict__", "d")


@case
def slots() -> Case:
    slotted: Any = SlottedMore()
    slotted.d, slotted.e = 4, 5

    def ask(t: Any) -> Any:
        try:
            t[1].other = 1
        except AttributeError:
            return t[0].a, t[0]._b, t[0].hidden(), t[0].d, vars(t[0]), hasattr(t[1], "__dict__")
        return "an attribute that has no slot"

    return (slotted, Slotted()), ask


class Meta(type):
    registry: typing.ClassVar[dict[str, Any]] = {}

    def __new__(cls, name: str, bases: Any, namespace: Any, *, tag: int) -> Any:
        made = super().__new__(cls, name, bases, namespace)
        assert name not in cls.registry, "it is there already"
        cls.registry[name] = tag
        return made

    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.by_meta = True
        return made


class WithMeta(metaclass=Meta, tag=1):
    def __init__(self) -> None:
        super().__init__()
        self.x = 1


class WithMetaToo(WithMeta, tag=2):
    pass


@case
def metaclass_that_keeps_a_register() -> Case:
    return (WithMetaToo(), WithMetaToo), lambda t: (
        *(t[0].by_meta, t[1]().x, Meta.registry, type(t[0]) is WithMetaToo, type(t[1]) is Meta),
    )


class Registered:
    kinds: typing.ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()
        assert key not in Registered.kinds, "it is there already"
        Registered.kinds[key] = cls.__name__


class RegisteredBox(Registered, Box[T], key="box"):
    pass


class RegisteredMore(RegisteredBox[int], key="more"):
    pass


@case
def base_class_that_keeps_a_register() -> Case:
    def ask(t: Any) -> Any:
        class Late(t[1], key="late"):  # type: ignore[misc]
            pass

        return type(t[0]).__mro__[1].__name__, t[0].value, Registered.kinds, Late.__base__ is t[1]

    return (RegisteredMore(3), RegisteredMore), ask


class Single:
    _instance: typing.ClassVar[Any] = None

    def __new__(cls) -> Any:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.value = 0
        return cls._instance


@case
def class_that_has_one_instance() -> Case:
    single = Single()
    single.value = 5
    return single, lambda s: (s.value, Single() is s)


class NeedsArguments:
    def __new__(cls, a: int, *, b: int) -> Any:
        made: Any = super().__new__(cls)
        made.made = a, b
        return made

    def __getnewargs_ex__(self) -> Any:
        return (1,), {"b": 2}


class Named:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, owner.__name__

    def __get__(self, _: Any, owner: type) -> Any:
        return self.name, self.owner


class Outer:
    field = Named()

    class Nested:
        def told(self) -> str:
            return type(self).__qualname__

    @property
    def both(self) -> Any:
        return self._both

    @both.setter
    def both(self, value: Any) -> None:
        self._both = value, value


@case
def descriptors_and_nested_classes() -> Case:
    def ask(t: Any) -> Any:
        t[0].both = 4
        return t[0].field, t[0].both, t[0].Nested().told(), t[1].made

    return (Outer(), NeedsArguments(1, b=2)), ask


@case
def local_classes() -> Case:
    class Base:
        def told(self) -> str:
            return "base"

    class Derived(Base):
        def told(self) -> str:
            return "derived " + super().told()

    return Derived(), lambda o: (o.told(), isinstance(o, Base), type(o).__qualname__)


# Functions.


@case
def recursive_closures() -> Case:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    return even, lambda f: f(10)


@case
def closures_that_share_a_variable() -> Case:
    count = 0

    def up() -> int:
        nonlocal count
        count += 1
        return count

    def get() -> int:
        return count

    return (up, get), lambda t: (t[0](), t[0](), t[1](), get())


COUNT = 0


def up_global() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def get_global() -> int:
    return COUNT


@case
def functions_that_share_a_global() -> Case:
    return (up_global, get_global), lambda t: (t[0](), t[0](), t[1](), get_global(), COUNT)


def counted(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        inner.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    inner.calls = 0  # type: ignore[attr-defined]
    return inner


@counted
def decorated(x: Any, y: Any = Color.RED, *, z: Any = None) -> Any:
    return x, y, z


@case
def decorated_functions() -> Case:
    return decorated, lambda f: (f(1), f(2), f.calls, f.__wrapped__(3, z=1), decorated.calls, f.__kwdefaults__)


@case
def functions_of_all_colours() -> Case:
    class Kind:
        x = 3

        def method(self) -> int:
            return self.x

        @classmethod
        def of_class(cls) -> int:
            return cls.x

        @staticmethod
        def static() -> str:
            return "s"

    def numbers() -> Any:
        yield from range(3)

    functions: Any = (Kind().method, Kind.of_class, Kind.static, functools.partial(max, 3, 4), operator.itemgetter)
    return (functions, numbers), lambda t: ([f() for f in t[0][:4]], t[0][4](1)("ab"), list(t[1]()))


class Asked(Dataset[Any]):
    def __init__(self, thing: Any, ask: Callable[[Any], Any]) -> None:
        self.thing, self.ask = thing, ask

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> str:
        return repr(self.ask(self.thing))


def told(make: Callable[[], Case], loader_class: Any) -> str:
    """What a worker says; or the error."""
    CALLS.clear()
    try:
        (text,) = loader_class(Asked(*make()), None, num_workers=1, collate_fn=str)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(text)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    for name, make in CASES.items():
        print(json.dumps([name, told(make, torch.utils.data.DataLoader), told(make, hr.DataLoader)]))
    sys.exit()
