"""Operators that others have written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from headrace.datasets.many import gives_many
from headrace.errors import OptionError
from headrace.functions import checked, is_async, name_of
from headrace.tasks import Step

GROUP = "headrace.operators"

_KINDS: dict[str, Literal["map", "filter", "many"]] = {"one": "map", "at most one": "filter", "many": "many"}
_registered: dict[str, Callable[..., SampleOp]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOp:
    """What is done to each sample of a stream.

    Attributes:
        fn: of a sample. A plain function runs in workers, an `async def` on the event loop.
        yields: "one": `fn` gives the sample that takes its place. "at most one": it says whether the sample is kept.
            "many": it gives a list of samples, or another iterable, which may be empty.
        random: set the random number generators from (seed, epoch, position) before each call; False saves some
            microseconds where `fn` draws none.
    """

    fn: Callable[[Any], Any]
    yields: Literal["one", "at most one", "many"] = "one"
    random: bool = True

    def __post_init__(self) -> None:
        if self.yields not in _KINDS:
            raise OptionError(f"SampleOp(yields={self.yields!r}): one of {', '.join(map(repr, _KINDS))} is meant")
        checked(self.fn, "SampleOp")

    @property
    def where(self) -> Literal["loop", "worker"]:
        """Where it runs."""
        return "loop" if is_async(self.step("").fn) else "worker"

    def step(self, name: str) -> Step:
        """The step of a stream that this is, under the name that errors, reports and states give it."""
        fn = gives_many(self.fn) if self.yields == "many" else self.fn
        return Step(name, _KINDS[self.yields], fn, self.random)


def register_operator(name: str, make: Callable[..., SampleOp]) -> None:
    """Have `data.apply_op(name, …)` do what the `hr.SampleOp` does that `make(…)` gives, in any stream.

    It goes to the workers with the streams: nothing has to be registered there. A second registration wins over the
    first. A package that is installed can name its function as an entry point of the group `headrace.operators`.
    `headrace.testing.OperatorContract` tests an operator.

    Args:
        name: a word, under which states and errors name it, too.
        make: called with the arguments of `apply_op`; gives a `hr.SampleOp`.

    Raises:
        OptionError: the name is none, or `make` cannot be called.

    Example:
        >>> import headrace as hr
        >>> hr.register_operator("times", lambda n: hr.SampleOp(fn=lambda sample: [sample] * n, yields="many"))
        >>> list(hr.DataLoader(hr.from_map([3, 4]).apply_op("times", 2), batch_size=None))
        [3, 3, 4, 4]
    """
    if not str(name).isidentifier():
        raise OptionError(f"register_operator({name!r}): a word is needed, of letters, digits and '_'")
    if not callable(make):
        raise OptionError(f"register_operator({name!r}, {make!r}): a function that gives a SampleOp is needed")
    _registered[name] = make


def registered_operators() -> dict[str, Callable[..., SampleOp]]:
    """Those that others have written, by name; what is installed is imported when it is first used."""
    return {**_installed(), **_registered}


def operator_step(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Step:
    """The step that an operator is, with these arguments.

    Raises:
        OptionError: there is no such operator, or it gives none.
    """
    known = registered_operators()
    if name not in known:
        have = ", ".join(sorted(known)) or "none"
        raise OptionError(f".apply_op({name!r}): register it first, by hr.register_operator; registered are: {have}")
    made = known[name](*args, **named)
    if not isinstance(made, SampleOp):
        raise OptionError(f".apply_op({name!r}): what is registered gave a {type(made).__name__}, and no hr.SampleOp")
    described = [*map(_describe, args), *(f"{key}={_describe(value)}" for key, value in named.items())]
    return made.step(f"{name}({', '.join(described)})")


def _describe(value: Any) -> str:
    """An argument, as a state names it: the same in each process."""
    return name_of(value) if callable(value) else repr(value)


@functools.cache
def _installed() -> dict[str, Callable[..., SampleOp]]:
    return {entry.name: functools.partial(_load, entry) for entry in entry_points(group=GROUP)}


def _load(entry: Any, *args: Any, **named: Any) -> SampleOp:
    made: SampleOp = entry.load()(*args, **named)
    return made
