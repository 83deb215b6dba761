"""Containers are rebuilt as torch's pin_memory rebuilds them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from torch.utils.data._utils.pin_memory import pin_memory

from headrace.delivery.device import rebuilt


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Leaf:
    """A value that torch pins by its own method, so that its function needs no accelerator here."""

    number: int
    is_changed: bool = False

    def pin_memory(self) -> Leaf:
        return Leaf(self.number, is_changed=True)


class Named(dict[str, Any]):
    def __init__(self, name: str, **values: Any) -> None:
        super().__init__(values)
        self.name = name


class FixedMapping(Mapping[str, Any]):
    """A mapping that cannot be made of a dict."""

    def __init__(self, first: Any, second: Any) -> None:
        self._parts = {"first": first, "second": second}

    def __getitem__(self, key: str) -> Any:
        return self._parts[key]

    def __iter__(self) -> Any:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


BATCHES = {
    "leaf": Leaf(1),
    "dict": {"a": Leaf(1), 2: [Leaf(2)]},
    "ordered": OrderedDict(b=Leaf(1), a=Leaf(2)),
    "dict with attributes": Named("of the user's", x=Leaf(1)),
    "user dict": UserDict(a=Leaf(1)),
    "proxy": MappingProxyType({"a": Leaf(1)}),
    "fixed mapping": FixedMapping(Leaf(1), Leaf(2)),
    "list": [Leaf(1), "text", b"bytes", None, 3, [], {}],
    "user list": UserList([Leaf(1)]),
    "tuple": (Leaf(1), (Leaf(2),)),
    "named tuple": Pair(Leaf(1), [Leaf(2)]),
    "range": range(3),
    "text": "text",
    "other": 1.5,
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batch_is_rebuilt_as_torch_pins_it(batch: Any) -> None:
    ours = rebuilt(batch, lambda value: isinstance(value, Leaf), Leaf.pin_memory)
    torchs = pin_memory(batch)
    assert type(ours) is type(torchs)
    assert ours == torchs
    assert vars(ours) == vars(torchs) if hasattr(torchs, "__dict__") else True


def test_original_containers_are_unchanged() -> None:
    inner = [Leaf(1)]
    batch = {"a": inner, "b": Leaf(2)}
    rebuilt(batch, lambda value: isinstance(value, Leaf), Leaf.pin_memory)
    assert batch == {"a": [Leaf(1)], "b": Leaf(2)}
    assert batch["a"] is inner


def test_type_error_of_the_function_is_raised() -> None:
    def fail(_: Any) -> None:
        raise TypeError("of the leaf")

    with pytest.raises(TypeError, match="of the leaf"):
        rebuilt({"a": [Leaf(1)]}, lambda value: isinstance(value, Leaf), fail)


@pytest.mark.parametrize("value", [bytearray(b"abc"), memoryview(b"abc")], ids=["bytearray", "memoryview"])
def test_buffers_are_kept_whole(value: Any) -> None:
    assert rebuilt([value], lambda _: False, lambda leaf: leaf)[0] is value
