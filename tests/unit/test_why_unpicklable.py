"""The path of what cannot be sent to a worker."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import CannotCarryError
from headrace.torch_compat.serialize import cannot_carry, cannot_carry_index

LOCK = threading.Lock()


class Plain:
    """A data set, a transform: whatever has attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def begin(self, worker: int) -> None:
        del worker


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, value: Any) -> None:
        self.first, self.second = "a", value


class Choosy(Plain):
    """Leaves what hinders out of its state, and keeps something else that does."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class Wrapper:
    """Passes attributes on to another data set, also during unpickling, before it has one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def closure(value: Any) -> Callable[[Any], Any]:
    return lambda batch: (batch, value)


def by_default(value: Any) -> Callable[..., Any]:
    def collate(batch: Any, *, log: Any = value) -> Any:
        return batch, log

    return collate


def with_global(value: Any) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"lock": value, "unused": LOCK}
    exec("def collate(batch):\n    return [lock for _ in batch] and lock\n", namespace)
    return namespace["collate"]


def class_with(value: Any) -> type:
    class Local:
        log = value

        def __init__(self) -> None:
            super().__init__()  # its cell holds the class: a circle

    return Local


def friends(value: Any) -> Plain:
    """Two objects that know one another, asked for the one without the fault first."""
    first = Plain()
    first.friend = Plain(friend=first)  # type: ignore[attr-defined]
    first.log = value  # type: ignore[attr-defined]
    return first


PATHS: list[tuple[str, Callable[[Any], Any]]] = [
    ("x", lambda value: value),
    ("x.transforms[2].log", lambda value: Plain(name="a", transforms=[1, Plain(), Plain(log=value)])),
    ("x['b'][1]", lambda value: {"a": 1, "b": ("c", value)}),
    ("x[0]", lambda value: {value}),
    ("x.second", Slotted),
    ("x.other", lambda value: Choosy(lock=LOCK, other=value)),
    ("x.<variable value>", closure),
    ("x.<global lock>", with_global),
    ("x.log", friends),
    ("x.log", by_default),
    ("x.args[0]", lambda value: functools.partial(print, value)),
    ("x.keywords['log'].log", lambda value: functools.partial(print, log=Plain(log=value))),
    ("x.func.<variable value>", lambda value: functools.partial(closure(value), 1)),
    ("x.__self__.log", lambda value: Plain(log=value).begin),
    ("type(x).log", lambda value: class_with(value)()),
    ("x.inner.log", lambda value: Wrapper(Plain(log=value))),
]


def named_by(value: Any) -> str:
    return str(cannot_carry(TypeError("nothing is found"), {"x": value})).partition(" cannot be sent")[0]


@pytest.mark.parametrize(("path", "make"), PATHS)
def test_path_names_the_unpicklable_value(path: str, make: Callable[[Any], Any]) -> None:
    assert named_by(make(LOCK)) == f"{path} (a _thread.lock)"
    assert named_by(make("just text")) == "x"


def test_value_that_refuses_pickling_is_named() -> None:
    class Refuses(Plain):
        def __getstate__(self) -> Any:
            raise ValueError("not today")

    error = cannot_carry(TypeError("nothing is found"), {"dataset": [Refuses(lock=LOCK)]})
    assert str(error).startswith(
        f"dataset[0] (a {__name__}.{Refuses.__qualname__}) cannot be sent to a worker: not today"
    )


def test_path_is_short_when_things_are_nested_deeply_or_in_circles() -> None:
    nested: list[Any] = [LOCK]
    for _ in range(150):
        nested = [nested]
    nested.append(nested)
    assert named_by(nested).startswith("x[0][0]")
    assert "…" in named_by(nested)
    assert len(named_by(nested)) < 300


def test_error_names_the_first_fault_and_a_remedy() -> None:
    reason = TypeError("cannot pickle something else")
    error = cannot_carry(reason, {"dataset": Plain(), "collate_fn": closure(LOCK), "worker_init_fn": None})
    assert isinstance(error, CannotCarryError)
    assert isinstance(error, TypeError)
    assert str(error).startswith(
        "collate_fn.<variable value> (a _thread.lock) cannot be sent to a worker: cannot pickle '_thread.lock' object."
    )
    for offer in ("__getitem__", "worker_init_fn", 'multiprocessing_context="fork"'):
        assert offer in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(cannot_carry_index(reason, [LOCK])).startswith("sampler's index[0] (a _thread.lock) cannot be sent")


def test_error_without_a_found_fault_keeps_the_reason() -> None:
    error = cannot_carry(MemoryError("no room"), {"dataset": Plain(), "collate_fn": None})
    assert str(error).startswith("dataset and collate_fn cannot be sent to a worker: no room.")
