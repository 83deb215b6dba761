"""Which requests a fault hits: a pure function of seed, rule, object, range and attempt."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args, get_origin

from headrace._util import check
from headrace.errors import OptionError
from headrace.testing.fault_server.answers import Plan, Request
from headrace.testing.fault_server.faults import FAULTS


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """Which requests are hit.

    Attributes:
        p: Share of the requests.
        match: Names of objects, as a shell pattern.
        method, range: This method; a Range header that contains this text.
        first, after, only, every: By the number of the attempt at the same object and range: the first N, those after
            N, only number N, each Nth.
        times: At most N requests. Of the faults with `times` only the first that is not used up can hit.
        burst, gap: N requests are hit, then N are not, in the order of arrival.
        t0, t1: From and until this many seconds after the server's start.
    """

    p: float = 1.0
    match: str = "*"
    method: str = ""
    range: str = ""
    first: float = math.inf
    after: int = 0
    only: int = 0
    every: int = 1
    times: float = math.inf
    burst: int = 0
    gap: int = 1
    t0: float = 0.0
    t1: float = math.inf

    def admits(self, request: Request, age_s: float) -> bool:
        attempt = request.attempt
        return (
            fnmatchcase(request.name, self.match)
            and self.method in ("", request.method)
            and self.range in (request.range or "")
            and self.after < attempt <= self.first
            and self.only in (0, attempt)
            and attempt % self.every == 0
            and self.t0 <= age_s < self.t1
        )


class Rule:
    """A fault, its parameters and selectors, parsed from text: `reset_body:p=0.3,at=100`.

    Raises:
        OptionError: there is no such fault or parameter.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fault, _, rest = text.partition(":")
        check.one_of(f"{text!r}: fault", self.fault, FAULTS)
        parameters, selectors = _hints(FAULTS[self.fault]), _hints(When)
        known, given = parameters | selectors, dict[str, Any]()
        for name, _, value in (part.partition("=") for part in rest.split(",") if part):
            check.one_of(f"{text!r}: parameter", name, known)
            try:
                given[name] = _value(value, known[name])
            except ValueError as error:
                raise OptionError(f"{name}={value} of {text!r} is not {error}") from None
        self.parameters = {name: value for name, value in given.items() if name in parameters}
        self.when = When(**{name: value for name, value in given.items() if name not in parameters})
        self._hits = self._seen = 0

    @property
    def is_used_up(self) -> bool:
        return self._hits >= self.when.times

    def hits(self, request: Request, rng: random.Random, age_s: float) -> bool:
        """True if this request is hit; then it is counted."""
        if not self.when.admits(request, age_s):
            return False
        if self.when.burst:
            self._seen += 1
            if (self._seen - 1) % (self.when.burst + self.when.gap) >= self.when.burst:
                return False
        if self.is_used_up or rng.random() >= self.when.p:
            return False
        self._hits += 1
        return True

    def change(self, plan: Plan) -> None:
        FAULTS[self.fault](plan, **self.parameters)


def chosen(rules: Iterable[Rule], request: Request, seed: int, age_s: float) -> Iterator[tuple[Rule, random.Random]]:
    """Yield the rules that hit a request, each with random numbers for its fault."""
    turn_is_taken = False
    for rule in rules:
        if rule.when.times < math.inf:
            if turn_is_taken or rule.is_used_up:
                continue
            turn_is_taken = True
        rng = random.Random(f"{seed}|{rule.text}|{request.name}|{request.method}|{request.range}|{request.attempt}")
        if rule.hits(request, rng, age_s):
            yield rule, rng


def _hints(function: Callable[..., object]) -> dict[str, object]:
    signature = inspect.signature(function, eval_str=True)
    return {name: known.annotation for name, known in signature.parameters.items() if known.annotation is not Plan}


def _value(text: str, hint: object) -> object:
    """Convert the text. The ValueError describes the expected value."""
    words = get_args(hint) if get_origin(hint) is Literal else ()
    if hint is str or text in words:
        return text
    if words:
        raise ValueError(" or ".join(words))
    try:
        return int(text) if hint is int else float(text)
    except ValueError:
        raise ValueError("a whole number" if hint is int else "a number") from None
