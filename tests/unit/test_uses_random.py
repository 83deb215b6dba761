"""What a function may draw from is told rightly, or else said to be everything."""

from __future__ import annotations

import functools
import math
import operator
import random
import re
import sys
import types
from collections.abc import Callable
from random import choice
from typing import Any

import numpy as np
import pytest
import torch
from naming import name_of
from numpy import random as numpy_random
from numpy.random import rand
from torch.utils.data import Dataset

import headrace as hr
from headrace.datasets.operators.fields import FieldMap
from headrace.work.keyed import getter
from headrace.work.randomness import EVERY_GENERATOR
from headrace.work.uses_random import generators_of, is_plain

SCALE = np.linspace(0, 1, 4)
WORD = re.compile(r"\w+")
TENSOR = torch.zeros(2)
TABLE: dict[str, Any] = {"how": math.sqrt}
TABLE_WITH_DRAWS: dict[str, Any] = {"how": [random.random]}
OWN_NUMPY = np.random.RandomState(0)
DRAWN = random.random
DRAW_OF_MODULE = types.ModuleType("augment")
DRAW_OF_MODULE.draw = lambda _: random.random()  # type: ignore[attr-defined]
DRAW_OF_MODULE.keep = lambda x: x  # type: ignore[attr-defined]


def flip(image: Any) -> Any:
    return image[:, ::-1] if hr.rng().random() < 0.5 else image


def scaled(image: Any) -> Any:
    return np.clip(np.sqrt(image * SCALE) + math.sin(0.5), 0, 255).astype(np.uint8)


def helped(image: Any) -> Any:
    def inner(part: Any) -> Any:
        return scaled(part)

    return [inner(flip(image)) for _ in range(2)]


def bounded_recursion(depth: int) -> int:
    return 0 if depth == 0 else bounded_recursion(depth - 1)


def words(sample: Any) -> Any:
    return WORD.findall(sample["txt"].decode())


def checked(sample: Any) -> Any:
    if not isinstance(sample, dict):
        raise TypeError(f"{sample!r:.20} is no dict")
    return sorted(sample, key=len)


def returned_inner(by: float) -> Callable[[Any], Any]:
    return lambda x: x * by + hr.rng().random()


class Crop:
    """Draws from hr.rng alone."""

    size = (4, 4)

    def __init__(self, margin: int) -> None:
        self.margin = margin
        self.more = [np.float32(1), {"names": ["a", "b"]}]

    def __call__(self, image: Any) -> Any:
        return self.cut(image, int(hr.rng().integers(self.margin)))

    def cut(self, image: Any, by: int) -> Any:
        self.last = by
        return image[by : by + self.wide]

    @property
    def wide(self) -> int:
        return self.size[0]

    @staticmethod
    def quiet(image: Any) -> Any:
        return image


class Narrow(Crop):
    def __call__(self, image: Any) -> Any:
        return super().cut(image, 1)


class Compose:
    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


class Digits(Dataset[Any]):
    """What a data set of torch's looks like."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.names = [f"{k}.png" for k in range(10_000)]
        self.transform = transform

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.names[index])


class Drawing(Crop):
    @property
    def wide(self) -> int:
        return random.randrange(4)


class Slotted:
    __slots__ = ("how",)

    def __init__(self, how: Any) -> None:
        self.how = how

    def __call__(self, sample: Any) -> Any:
        return self.how()


class Meta(type):
    pass


class WithMeta(metaclass=Meta):
    def __call__(self, sample: Any) -> Any:
        return sample


class ListOfSteps(list[Any]):
    def __call__(self, sample: Any) -> Any:
        return self[0](sample)


class Made:
    def __init__(self) -> None:
        self.value = random.random()


class MakesAnother(Made):
    """Its methods draw nothing, but what they make does."""

    def __call__(self, sample: Any) -> Any:
        return MakesAnother().value


class MakesByClassMethod(Made):
    def __call__(self, sample: Any) -> Any:
        return self.another().value

    @classmethod
    def another(cls) -> MakesByClassMethod:
        return cls()


class MakesByBase(MakesByClassMethod):
    def __call__(self, sample: Any) -> Any:
        return super().another().value


class GivesClass:
    """A descriptor that gives the class it is asked through."""

    def __get__(self, _: Any, owner: Any = None) -> Any:
        return owner


class MakesByDescriptor(Made):
    own = GivesClass()

    def __call__(self, sample: Any) -> Any:
        return self.own().value


class MakesByType(Made):
    def __call__(self, sample: Any) -> Any:
        return type(self)().value


class MakesByName(Made):
    def __call__(self, sample: Any) -> Any:
        return self.__class__().value


class MakesAgain(Made):
    def __call__(self, sample: Any) -> Any:
        self.__init__()  # type: ignore[misc]
        return self.value


class HoldsDrawn(Made):
    """Has drawn once, when it was made; not again."""

    def __call__(self, sample: Any) -> Any:
        return self.value


class Odd:
    """Raises when it is looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise LookupError


@pytest.mark.parametrize(
    "function",
    [
        flip,
        scaled,
        helped,
        bounded_recursion,
        words,
        checked,
        returned_inner(2.0),
        lambda sample: {**sample, "n": len(sample["jpg"])},
        lambda sample: sum(k * k for k in sample),
        lambda sample: TABLE["how"](sample),
        functools.partial(operator.mul, 2),
        functools.partial(flip),
        Crop(3),
        Crop(3).cut,
        Crop.quiet,
        Narrow(3),
        Compose(flip, Crop(2), np.sqrt, functools.partial(np.multiply, 2.0), str.upper and len),
        lambda x: DRAW_OF_MODULE.keep(x),
        HoldsDrawn(),
        FieldMap(flip, "jpg"),
        getter(Digits(flip)),
        np.sqrt,
        math.sqrt,
        "text".join,
        float,
    ],
    ids=name_of,
)
def test_nothing_is_drawn_from_when_all_is_understood(function: Any) -> None:
    assert generators_of(function) == frozenset()


@pytest.mark.parametrize(
    ("function", "generator"),
    [
        (lambda _: random.random(), "random"),
        (lambda x: choice(x), "random"),
        (random.random, "random"),
        (random.choice, "random"),
        (lambda _: DRAWN(), "random"),
        (lambda x, how=random.gauss: how(x, 1), "random"),
        (lambda x: TABLE_WITH_DRAWS["how"][0](), "random"),
        (lambda x: DRAW_OF_MODULE.draw(x), "random"),
        (lambda x: [random.random() for _ in x], "random"),
        (lambda x: (lambda: random.random())(), "random"),  # noqa: PLC3002
        (functools.partial(max, random.random), "random"),
        (Drawing(1), "random"),
        (Drawing(1).cut, "random"),
        (Compose(Compose(Drawing(1))), "random"),
        (FieldMap(Drawing(1), 0), "random"),
        (getter(Digits(Drawing(1))), "random"),
        (lambda _: Made(), "random"),
        (MakesAnother(), "random"),
        (MakesByClassMethod(), "random"),
        (MakesByBase(), "random"),
        ([HoldsDrawn(), lambda _: HoldsDrawn()], "random"),
        (lambda _: np.random.rand(), "numpy"),  # noqa: NPY002
        (lambda _: rand(), "numpy"),  # noqa: NPY002
        (rand, "numpy"),
        (lambda _: numpy_random.normal(), "numpy"),  # noqa: NPY002
        (lambda _: OWN_NUMPY.rand(), "numpy"),
        (lambda _: torch.rand(2), "torch"),
        (lambda x: torch.from_numpy(x).to(torch.float32), "torch"),
    ],
    ids=name_of,
)
def test_the_generator_is_found_when_it_is_reached(function: Any, generator: str) -> None:
    assert generators_of(function) == {generator}


def test_all_generators_are_found_that_are_reached() -> None:
    assert generators_of(lambda x: (random.random(), np.random.rand(), torch.rand(2), flip(x))) == EVERY_GENERATOR  # noqa: NPY002
    assert generators_of(lambda _: (random.random(), np.random.rand())) == {"random", "numpy"}  # noqa: NPY002


def imports(_: Any) -> Any:
    from random import random as draw

    return draw()


def rebinds(x: Any) -> Any:
    global DRAWN
    DRAWN = x
    return DRAWN()


def names_module(_: Any) -> Any:
    module = random
    return module.random()


def declares(_: Any) -> Any:
    class Inner:
        value = random.random

    return Inner.value()


def closes_over_a_module() -> Callable[[Any], Any]:
    import random as module

    return lambda _: module.random()


def with_attribute(_: Any) -> Any:
    return with_attribute.how()  # type: ignore[attr-defined]


with_attribute.how = Slotted(random.random)  # type: ignore[attr-defined]


def matches(x: Any) -> Any:
    match x:
        case object(__globals__=names):
            return names["random"]


def unwrapped(function: Any) -> Any:
    """As a careless decorator does it: the name of another function."""

    @functools.wraps(hr.rng)
    def wrapper(sample: Any) -> Any:
        return function()

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        imports,
        rebinds,
        names_module,
        declares,
        closes_over_a_module(),
        with_attribute,
        matches,
        lambda _: getattr(random, "random")(),  # noqa: B009
        lambda _: getattr(np, "ran" + "dom").rand(),
        lambda _: eval("random.random()"),
        lambda _: globals()["random"].random(),
        lambda _: __import__("random").random(),
        lambda _: sys.modules["random"].random(),
        lambda _: flip.__globals__["np"].random.rand(),
        lambda _: np.__builtins__["eval"]("1"),  # type: ignore[attr-defined]
        lambda _: random.__builtins__["eval"]("1"),  # type: ignore[attr-defined]
        lambda _: ().__class__.__base__.__subclasses__(),  # type: ignore[union-attr]
        lambda _: (k for k in ()).gi_frame.f_globals["random"],
        lambda _: memoryview(b"").obj,
        lambda _: operator.attrgetter("random")(random),
        lambda _: len.__self__.eval("1"),  # type: ignore[attr-defined]
        object.__subclasses__,
        operator.attrgetter("x"),
        lambda _: np.load("x.npy", allow_pickle=True),
        lambda _: not_there(),  # type: ignore[name-defined] # noqa: F821
        lambda _: torch.nn.functional.dropout(TENSOR),
        lambda _: TENSOR.random_(),
        lambda _: torch.ops.aten.rand([2]),
        torch.Tensor.random_,
        torch.nn.Dropout(),
        np.frompyfunc(random.random, 0, 1),
        np.vectorize(random.random),
        np.array([random.random], object),
        functools.lru_cache(random.random),
        map(random.random, ()),
        Slotted(random.random),
        WithMeta(),
        ListOfSteps([random.random]),
        Odd(),
        MakesByDescriptor(),
        MakesByType(),
        MakesByName(),
        MakesAgain(),
        [object() for _ in range(10_000)],
    ],
    ids=name_of,
)
def test_all_generators_count_when_something_is_not_understood(function: Any) -> None:
    assert generators_of(function) == EVERY_GENERATOR


def test_a_borrowed_name_makes_no_function_harmless() -> None:
    assert generators_of(unwrapped(random.random)) == {"random"}


class Strange(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "sample",
    [
        3,
        "text",
        b"bytes",
        None,
        np.float32(1),
        np.zeros(3),
        {"__key__": "a", "jpg": b"..", "box": (1, 2, 3, 4), "mask": np.zeros((2, 2), bool)},
        [{"a": [1, 2]}],
    ],
    ids=repr,
)
def test_a_sample_is_plain_when_it_holds_numbers_text_and_arrays(sample: Any) -> None:
    assert is_plain(sample)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "sample",
    [
        object(),
        flip,
        torch.zeros(2),
        np.array([None], object),
        np.ma.zeros(3),
        Strange(),
        {"a": Strange()},
        {"a": {"b": [Strange()]}},
        {Slotted(1): 1},
        [1, torch.zeros(2)],
        slice(Strange()),
        CYCLE,
        [0] * 1000,
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_a_sample_is_not_plain_when_it_holds_anything_else(sample: Any) -> None:
    assert not is_plain(sample)
