"""What cannot be sent to a worker is named by its path."""

from __future__ import annotations

import collections
import enum
import functools
import logging
import pickle
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.errors import CannotCarryError
from headrace.torch_compat.why_unpicklable import cannot_carry, why_not

LOCK = threading.Lock()


class Plain:
    """A data set, a transform: whatever has attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def begin(self, worker: int) -> None:
        del worker


class Slotted:
    __slots__ = ("first", "second")


class Choosy(Plain):
    """Leaves what hinders out of its state, and keeps something else that does."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class FrozenKey:
    def __init__(self, log: Any) -> None:
        self.log = log


class Wrapper:
    """Passes on what it is asked to another data set; when it is made anew, before it has one, too."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Dotted(dict[str, Any]):
    __getattr__ = dict.__getitem__


def kept(value: Any) -> Any:
    KEPT.append(value)
    return value


KEPT: list[Any] = []


class Two(NamedTuple):
    name: str
    log: Any


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "log").write_bytes(b"")
    with (tmp_path / "log").open("rb") as opened:
        yield opened


def slotted(value: Any) -> Slotted:
    made = Slotted()
    made.first, made.second = "a", value
    return made


def closure(value: Any) -> Callable[[Any], Any]:
    return lambda batch: (batch, value)


def by_default(value: Any) -> Callable[..., Any]:
    def collate(batch: Any, *, log: Any = value) -> Any:
        return batch, log

    return collate


def class_with(value: Any) -> type:
    class Local:
        log = value

        def __init__(self) -> None:
            super().__init__()  # its cell holds the class: a circle

        @property
        def name(self) -> str:
            return "local"

    return Local


def friends(value: Any) -> Plain:
    """Two objects that know one another, asked for the one without the fault first."""
    first = Plain()
    first.friend = Plain(friend=first)  # type: ignore[attr-defined]
    first.log = value  # type: ignore[attr-defined]
    return first


PATHS: dict[str, Callable[[Any], Any]] = {
    "x": lambda value: value,
    "x.transforms[2].log": lambda value: Plain(name="a", transforms=[1, Plain(), Plain(log=value)]),
    "x['b'][1]": lambda value: {"a": 1, "b": ("c", value)},
    "x[7]": lambda value: {7: value},
    "x.<element>": lambda value: {1, value},
    "x.<key <FrozenKey>>.log": lambda value: {FrozenKey(value): 1},
    "x.second": slotted,
    "x.other": lambda value: Choosy(lock=LOCK, other=value),
    "x.pair.log": lambda value: Plain(pair=Two("a", value)),
    "x[1]": lambda value: collections.deque([1, value]),
    "x['log']": lambda value: collections.OrderedDict(a=1, log=value),
    "x.<variable value>": closure,
    "x.<default log>": by_default,
    "x.args[0]": lambda value: functools.partial(print, value),
    "x.keywords['log'].log": lambda value: functools.partial(print, log=Plain(log=value)),
    "x.func.<variable value>": lambda value: functools.partial(closure(value), 1),
    "x.__self__.log": lambda value: Plain(log=value).begin,
    "type(x).log": lambda value: class_with(value)(),
    "x.log": friends,
    "x.__wrapped__.<variable value>": lambda value: functools.lru_cache(closure(value)),
    "x.heavy.func.<variable value>": lambda value: type(
        "Lazy", (), {"heavy": functools.cached_property(closure(value))}
    ),
    "x.name.fget.<variable value>": lambda value: type("Named", (), {"name": property(closure(value))}),
    "type(x).make.__func__.<variable value>": lambda value: type("Made", (), {"make": classmethod(closure(value))})(),
    "x.inner.log": lambda value: Wrapper(Plain(log=value)),
    "x['inner'].log": lambda value: Dotted(inner=Plain(log=value)),
    "type(x).file": lambda value: enum.Enum("Level", {"log": 1, "file": value}).log,  # type: ignore[attr-defined]
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "make"), PATHS.items(), ids=list(PATHS))
def test_why_not_names_the_path_of_what_is_at_fault(path: str, make: Callable[[Any], Any], file: Any) -> None:
    assert why_not(make(file), "x") == f"{path} (a _io.BufferedReader)"


@pytest.mark.parametrize(("path", "make"), PATHS.items(), ids=list(PATHS))
def test_why_not_is_silent_when_everything_travels(path: str, make: Callable[[Any], Any]) -> None:
    assert why_not(make("just text"), "x") is None


def test_why_not_names_a_global_that_a_function_uses() -> None:
    namespace: dict[str, Any] = {"lock": threading.Lock(), "unused": threading.Lock()}
    exec("def collate(batch):\n    return [lock.acquire() for _ in batch]\n", namespace)
    assert why_not(namespace["collate"], "collate_fn") == "collate_fn.<global lock> (a _thread.lock)"


def numbers() -> Iterator[int]:
    yield 1


def test_why_not_names_the_type_of_what_is_at_fault(tmp_path: Path) -> None:
    connection = sqlite3.connect(":memory:")
    with (tmp_path / "log").open("w") as log, socket.socket() as sock:
        cases = {
            "_io.TextIOWrapper": log,
            "_thread.lock": threading.Lock(),
            "generator": numbers(),
            "socket.socket": sock,
            "sqlite3.Connection": connection,
            "_thread._local": threading.local(),
        }
        for kind, value in cases.items():
            assert why_not(Plain(value=value), "dataset") == f"dataset.value (a {kind})"
    connection.close()


def test_why_not_takes_loggers_and_what_is_known_by_name() -> None:
    assert why_not(Plain(log=logging.getLogger("a"), function=len, kind=Plain), "dataset") is None


def test_why_not_stops_at_what_raises_while_it_is_pickled() -> None:
    class Refuses(Plain):
        def __reduce__(self) -> Any:
            raise ValueError("not today")

    assert why_not([Refuses(lock=LOCK)], "dataset") == f"dataset[0] (a {__name__}.{Refuses.__qualname__})"


def test_why_not_ends_when_things_are_nested_deeply_or_in_circles() -> None:
    nested: list[Any] = [LOCK]
    for _ in range(150):
        nested = [nested]
    nested.append(nested)
    assert (why_not(nested, "dataset") or "").startswith("dataset[0][0]")


def test_error_names_the_first_that_is_at_fault_and_offers_what_to_do() -> None:
    reason = TypeError("cannot pickle '_thread.lock' object")
    error = cannot_carry(reason, {"dataset": Plain(), "collate_fn": closure(LOCK), "worker_init_fn": None})

    assert isinstance(error, CannotCarryError)
    assert isinstance(error, TypeError)
    assert str(error).startswith(
        "collate_fn.<variable value> (a _thread.lock) cannot be sent to a worker: cannot pickle '_thread.lock' object."
    )
    for offer in ("__getitem__", "worker_init_fn", 'multiprocessing_context="fork"'):
        assert offer in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_error_gives_the_reason_of_what_it_names_when_there_are_several() -> None:
    class Both:
        first = functools.lru_cache(closure(LOCK))

        def __init__(self) -> None:
            self.local = threading.local()

    error = cannot_carry(TypeError("cannot pickle something else"), {"dataset": Both()})
    named, _, reason = str(error).partition(" cannot be sent to a worker: ")
    assert named in (
        "dataset.local (a _thread._local)",
        "type(dataset).first.__wrapped__.<variable value> (a _thread.lock)",
    )
    assert f"cannot pickle '{named.partition('(a ')[2].rstrip(')')}' object" in reason


def test_path_is_short_when_things_are_nested_deeply() -> None:
    first = node = Plain()
    for _ in range(5000):
        node.next_of_them = Plain()  # type: ignore[attr-defined]
        node = node.next_of_them  # type: ignore[attr-defined]
    message = why_not(first, "dataset") or ""
    assert message.startswith("dataset.next_of_them.next_of_them")
    assert "…" in message
    assert len(message) < 400


def test_error_keeps_the_reason_when_nothing_is_found_at_fault() -> None:
    error = cannot_carry(MemoryError("no room"), {"dataset": Plain(), "collate_fn": None})
    assert str(error).startswith("dataset and collate_fn cannot be sent to a worker: no room.")
