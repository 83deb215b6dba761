"""Containers in samples and batches."""

from __future__ import annotations

import copy
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from watching import Note, compare, program, read, run


class Point(NamedTuple):
    x: Any
    y: Any = None


class Pixel(Point):
    """A subclass of a named tuple."""


class Typed(TypedDict):
    image: torch.Tensor
    label: int


class Attributes(dict[str, Any]):
    """Its entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Checked(dict[str, Any]):
    """Wants to be made by its own rule."""

    def __init__(self, *, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)


class Rows(list[Any]):
    def __init__(self, values: Sequence[Any] = (), unit: str = "m") -> None:
        super().__init__(values)
        self.unit = unit


class View(Sequence[Any]):
    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


class Frozen(Mapping[str, Any]):
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass
class Box:
    corner: tuple[int, int]
    values: torch.Tensor
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    value: int


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


def image(k: int) -> torch.Tensor:
    return torch.full((3, 40, 40), float(k))


@program
def mappings(loader: Any, note: Note) -> None:
    makers = {
        "dict": lambda k: {"image": image(k), "label": k, "name": f"{k}.png"},
        "in another order": lambda k: {"a": k, "b": 1} if k % 2 else {"b": 1, "a": k},
        "nested": lambda k: {"a": {"b": {"c": (k, [k, {"d": np.float32(k)}])}}},
        "of numbers": lambda k: {0: k, (1, 2): k, None: "x", 2.5: b"y"},
        "empty": lambda _: {},
        "typed": lambda k: Typed(image=image(k), label=k),
        "ordered": lambda k: OrderedDict([("z", k), ("a", 1.5)]),
        "default": lambda k: defaultdict(list, a=k, b=[k]),
        "counter": lambda k: Counter({"a": k, "b": 2}),
        "chained": lambda k: ChainMap({"a": k}, {"b": 2}),
        "user's": lambda k: UserDict({"a": k}),
        "attributes": lambda k: Attributes(image=image(k), label=k),
        "made by its own rule": lambda k: Checked(entries={"a": k}),
        "frozen": lambda k: Frozen({"a": k, "b": image(k)}),
        "a key missing in the second": lambda k: {"a": 1, "b": 2} if k % 2 == 0 else {"a": 1},
        "a key more in the second": lambda k: {"a": 1} if k % 2 == 0 else {"a": 1, "b": 2},
        "another type in the second": lambda k: {"a": 1} if k % 2 == 0 else [1],
    }
    compare(loader, note, makers)


@program
def sequences(loader: Any, note: Note) -> None:
    makers = {
        "tuple": lambda k: (image(k), k),
        "list": lambda k: [image(k), k],
        "nested": lambda k: ((k, (k, [k, (k,)])), "a"),
        "empty tuple": lambda _: (),
        "empty list": lambda _: [],
        "named": lambda k: Point(image(k), k),
        "of a named one": lambda k: Pixel(k, Point(1, k)),
        "rows": lambda k: Rows([k, 1.5], unit="km"),
        "view": lambda k: View([k, "a"]),
        "user's": lambda k: UserList([k, 2]),
        "deque": lambda k: deque([k, 2], maxlen=5),
        "range": lambda k: range(k, k + 2),
        "unequal lengths": lambda k: [1] * (1 + k % 2),
        "size": lambda k: torch.Size([k, 1]),
        "tuple, then list": lambda k: (k, 1) if k % 2 == 0 else [k, 1],
        "of tensors": lambda k: [torch.ones(2, 2) * k, torch.zeros(0)],
        "of text": lambda k: ["a", f"{k}"],
    }
    compare(loader, note, makers)


@program
def objects(loader: Any, note: Note) -> None:
    makers = {
        "none": lambda _: None,
        "none within": lambda k: (k, None),
        "data class": lambda k: Box((k, 1), image(k), ["a"]),
        "data class with slots": lambda k: Slotted(k),
        "plain": lambda k: Plain([k, image(k)]),
        "namespace": lambda k: SimpleNamespace(a=k, b=image(k)),
        "exception": lambda k: KeyError(k),
        "exceptions with attributes": lambda k: OSError(2, "not there", f"file {k}"),
    }
    compare(loader, note, makers)


def collate_boxes(boxes: list[Box]) -> Box:
    return Box(boxes[0].corner, torch.stack([box.values for box in boxes]), [str(len(boxes))])


class Collate:
    """A callable with a state that is each worker's own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        return {"batch": default_collate(samples), "calls": self.calls, "types": [type(s).__name__ for s in samples]}

    def method(self, samples: list[Any]) -> Any:
        return self, samples


@program
def collate_functions(loader: Any, note: Note) -> None:
    boxes = [Box((k, k), image(k)) for k in range(5)]
    offset = 100
    functions = {
        "data classes": collate_boxes,
        "callable": Collate(),
        "method": Collate().method,
        "lambda": lambda samples: [box.corner[0] + offset for box in samples],
        "class": Plain,
        "builtin": tuple,
        "length": len,
        "numpy": lambda samples: np.stack([box.values.numpy() for box in samples]),
        "nothing": lambda _: None,
        "first": lambda samples: samples[0].values,
        "the same twice": lambda samples: [samples[0].values] * 2,
    }
    for name, function in functions.items():
        note(name)
        read(loader, note, boxes, 2, workers=(0, 1), collate_fn=function)


@program
def rules_of_the_users_for_default_collate(loader: Any, note: Note) -> None:
    def collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return "boxes", collate_boxes(batch), len(collate_fn_map)

    before = dict(default_collate_fn_map)
    default_collate_fn_map[Box] = collate
    try:
        boxes = {"box": lambda k: {"box": Box((k, 0), image(k)), "k": k}, "list": lambda k: [Box((k, 0), image(k))]}
        compare(loader, note, boxes)
    finally:
        default_collate_fn_map.clear()
        default_collate_fn_map.update(before)


@program
def copies_of_one_object(loader: Any, note: Note) -> None:
    """Which of the objects that a batch holds twice are one."""

    def collate(samples: list[Any]) -> Any:
        array, text, inner = np.arange(3), f"text {len(samples)}", [1]
        twice = {"arrays": [array, array], "texts": [text, text], "lists": [inner, inner]}
        return twice | {"copied": [inner, copy.copy(inner)]}

    for workers in (0, 1):
        for batch in loader(range(2), num_workers=workers, collate_fn=collate):
            note(workers, {key: one is other for key, (one, other) in batch.items()}, batch)


if __name__ == "__main__":
    run()
