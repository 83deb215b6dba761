"""What can be resumed of torch's parts: data sets, samplers and generators.

An object is stateful when it has both `state_dict` and `load_state_dict`; that is all that is asked of it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import BatchSampler

from headrace.errors import StateMismatchError
from headrace.failures import PackedError
from headrace.torch_compat import serialize

_NESTED_MOST = 8

PackedStates = bytes | PackedError
"""States, or why they could not be had."""


def is_stateful(thing: Any) -> bool:
    """Whether an object can say its state, and take it back. The parameters of a module are none."""
    if isinstance(thing, torch.nn.Module) and type(thing).state_dict is torch.nn.Module.state_dict:
        return False
    try:
        return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    except Exception:  # a property that cannot be had
        return False


def load(thing: Any, states: dict[str, Any] | None, name: str) -> None:
    """Give an object its part of `states`, if there is one.

    Raises:
        StateMismatchError: there is, and the object takes no state.
    """
    if not states or name not in states:
        return
    if not is_stateful(thing):
        raise StateMismatchError(
            f"the state has one of the {name}, and {type(thing).__name__} has no load_state_dict", field=name
        )
    thing.load_state_dict(states[name])


def packed_states(dataset: Any, iterator: Any) -> PackedStates | None:
    """The states of a data set and of what iterates over it, only once where they are one object; None without any.

    Batches are made whether a state can be had or not: `unpacked_states` raises what goes wrong here.
    """
    states = {}
    try:
        if iterator is not dataset and is_stateful(dataset):
            states["dataset"] = dataset.state_dict()
        if iterator is not None and is_stateful(iterator):
            states["iterator"] = iterator.state_dict()
        return serialize.pack_bytes(states) if states else None
    except Exception as error:
        return failed(error, "raised where the state of the data set was asked for")


def failed(error: Exception, note: str) -> PackedError:
    """What stands for a state that could not be had."""
    error.add_note(note)
    return serialize.pack_error(error)


def is_known(packed: PackedStates | None) -> TypeGuard[bytes]:
    """Whether somebody can go on from a state that `packed_states` gave."""
    return isinstance(packed, bytes)


def unpacked_states(packed: PackedStates | None) -> dict[str, Any] | None:
    """The states that `packed_states` gave, as objects of their own."""
    if packed is None:
        return None
    if isinstance(packed, PackedError):
        raise serialize.unpack_error(packed)
    states: dict[str, Any] = serialize.unpack_bytes(packed)
    return states


# Random numbers.


def encoded(state: torch.Tensor) -> str:
    """The state of a generator as text."""
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode("ascii")  # half of torch's bytes are zero


def decoded(text: str) -> torch.Tensor:
    """The state of a generator that `encoded` gave.

    Raises:
        StateMismatchError: it did not.
    """
    try:
        return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise StateMismatchError(f"{text!r:.50} is no state of a generator: {error}", field="generators") from error


class StateSource:
    """Where draws come from: a generator, or torch's global one.

    A state cannot set the global one, which is the user's. When it was drawn from, and is now another than it was when
    the state was made, draws go on from a place of our own, as they would have gone on there; until somebody else
    draws from the global one, or seeds it.

    Args:
        generator: None for torch's global one.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self._own: torch.Tensor | None = None
        self._outside: torch.Tensor | None = None  # the global one's state, as long as we draw from a place of our own

    def now(self) -> torch.Tensor:
        """The state that the next draw begins with."""
        if self.generator is not None:
            return self.generator.get_state()
        outside = torch.get_rng_state()
        own = self._place(outside)
        return outside if own is None else own

    def go_on(self, state: torch.Tensor) -> None:
        """Have the next draw begin there."""
        if self.generator is not None:
            self.generator.set_state(state)
        else:
            self._outside = torch.get_rng_state()
            self._own = None if torch.equal(self._outside, state) else state

    def _place(self, outside: torch.Tensor) -> torch.Tensor | None:
        """Where the next draw begins, if that is a place of our own."""
        if self._own is not None and self._outside is not None and not torch.equal(self._outside, outside):
            self._own = None
        return self._own

    @contextlib.contextmanager
    def drawing(self, at: torch.Tensor | None = None) -> Iterator[None]:
        """What is drawn within comes from here.

        Args:
            at: begin there. The global generator is left as it was before, for what is drawn was drawn once already.
        """
        if self.generator is not None:
            if at is not None:
                self.generator.set_state(at)
            yield
            return
        outside = torch.get_rng_state()
        begin = self._place(outside) if at is None else at
        if begin is None:
            yield
            return
        torch.set_rng_state(begin)
        try:
            yield
        finally:
            if at is None:
                self._own = torch.get_rng_state()
            torch.set_rng_state(outside)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn within does not count."""
        before = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        try:
            yield
        finally:
            (torch.set_rng_state if self.generator is None else self.generator.set_state)(before)


class Draws:
    """The sources of one loader's draws: that of base seeds, and that of its sampler, which may be the same.

    Args:
        generator: the loader's.
        sampler: what it asks for indices.
    """

    def __init__(self, generator: torch.Generator | None, sampler: Any) -> None:
        own = _generator_of(sampler)
        self.base = StateSource(generator)
        self.sampler = self.base if own is generator else StateSource(own)
        self._all = list(dict.fromkeys((self.base, self.sampler)))

    def now(self) -> list[str]:
        """The sources' states, as text."""
        return [encoded(source.now()) for source in self._all]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn within does not count."""
        with contextlib.ExitStack() as stack:
            for source in self._all:
                stack.enter_context(source.kept())
            yield

    def go_on(self, states: list[str]) -> None:
        """Have the next draws begin where the sources were.

        Raises:
            StateMismatchError: these are the states of others.
        """
        if len(states) != len(self._all):
            raise StateMismatchError(
                "generator: the loader, or its sampler, had another one when the state was made", field="generator"
            )
        for source, state in zip(self._all, states, strict=True):
            source.go_on(decoded(state))


def _generator_of(sampler: Any) -> torch.Generator | None:
    generators = (getattr(part, "generator", None) for part in chain_of(sampler))
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


def _drawing(source: StateSource, at: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """What is drawn within was drawn once already, from there; None: it was not."""
    return contextlib.nullcontext() if at is None else source.drawing(at)


# Samplers.


def chain_of(sampler: Any) -> Iterator[Any]:
    """A sampler, the one that it takes its indices from, and so on."""
    for _ in range(_NESTED_MOST):  # an object may have an attribute of any name, without end
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


class _Kept(NamedTuple):
    drawn: int
    states: dict[str, Any] | PackedError | None  # bytes stand for states that could not be had
    is_over: bool


class Indices:
    """What a sampler gives in one epoch; and what is needed to have it go on after any of the last of them.

    Where neither the sampler nor its iterator is stateful that is a number, and the state of the generator from which
    the order was drawn. torch's own BatchSampler is looked through.

    Args:
        sampler: the loader's batch sampler or sampler.
        opened: `iter` of it.
        source: where it draws random numbers.
        before: the state of `source` before `iter` was called.
        every: says after how many indices a stateful sampler is asked for its state; 0: only before the first, at the
            end, and by `after`.
    """

    def __init__(
        self, sampler: Any, opened: Any, source: StateSource, before: torch.Tensor | None, every: Callable[[], int]
    ) -> None:
        self._outer, self._source, self._every = sampler, source, every
        self._is_plain = type(sampler) is BatchSampler
        self._sampler: Any = sampler.sampler if self._is_plain else sampler
        self._iterator: Any = None if self._is_plain else opened  # as lazily as torch
        draws_later = self._is_plain or isinstance(opened, GeneratorType)
        self._before = None if draws_later else before
        self._first: torch.Tensor | None = None  # the source's state when the first one was drawn
        self._waiting: deque[Any] = deque()
        self._kept: deque[_Kept] = deque()
        self._end: dict[str, Any] | PackedError | None = None  # the states after the end
        self._is_over = False
        self.drawn = 0

    @classmethod
    def resumed(cls, sampler: Any, source: StateSource, loaded: dict[str, Any], every: Callable[[], int]) -> Indices:
        """Those that come after the ones of which `told` was made."""
        before, first = (None if text is None else decoded(text) for text in loaded["start"])
        states = copy.deepcopy(loaded["states"])
        plain = type(sampler) is BatchSampler
        load(sampler.sampler if plain else sampler, states, "sampler")
        with source.kept() if states is not None else _drawing(source, before):
            opened = None if plain else iter(sampler)
        indices = cls(sampler, opened, source, None, every)
        indices._before, indices._first = before, first
        with source.kept() if states is not None else _drawing(source, first):
            indices._go_to(loaded, states)
        return indices

    def _go_to(self, loaded: dict[str, Any], states: dict[str, Any] | None) -> None:
        self.drawn, self._is_over = loaded["batches"], loaded["is_over"]
        if states is not None:
            if self.drawn or "iterator" in states:  # otherwise what opening it draws is still to be drawn
                self._open()
            load(self._iterator, states, "iterator")
            self._kept.append(_Kept(self.drawn, copy.deepcopy(loaded["states"]), self._is_over))
        elif self._first is not None:
            self._open()
            count = self.drawn if loaded["samples"] is None or not self._is_plain else loaded["samples"]
            next(itertools.islice(self._iterator, count, count), None)
            with contextlib.suppress(StopIteration):  # the order is drawn with the first, also where that comes later
                self._waiting.append(self._draw())

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        if self._waiting:
            index = self._waiting.popleft()
        elif self._first is None:
            self._first = self._source.now()
            with self._source.drawing():
                self._open()
                self._keep()
                index = self._draw()
        else:
            index = self._draw()
        self.drawn += 1
        every = self._every()
        if every and self.drawn % every == 0:
            self._keep()
        return index

    def _open(self) -> None:
        if self._iterator is None:
            self._iterator = iter(self._sampler)

    def _draw(self) -> Any:
        try:
            if self._is_over:  # the last batch was a short one
                raise StopIteration
            if not self._is_plain:
                return next(self._iterator)
            size = self._outer.batch_size
            batch = list(itertools.islice(self._iterator, size))
            self._is_over = len(batch) < size
            if not batch or (self._is_over and self._outer.drop_last):
                raise StopIteration
        except StopIteration:
            self._is_over = True
            if self._end is None:  # asked for more once again, the sampler may be in the next epoch
                self._end = self._states()  # what it carries on into that
            raise
        return batch

    def _states(self) -> dict[str, Any] | PackedError | None:
        things = {"sampler": self._sampler, "iterator": self._iterator}
        if self._iterator is self._sampler:
            del things["sampler"]
        try:
            states = {name: thing.state_dict() for name, thing in things.items() if is_stateful(thing)}
            return copy.deepcopy(states) or None
        except Exception as error:  # indices come whether a state can be had or not
            return failed(error, "raised where the state of the sampler was asked for")

    def _keep(self) -> None:
        states = self._states()
        if states is not None:
            self._kept.append(_Kept(self.drawn, states, self._is_over))

    def until(self, number: int) -> list[tuple[int, Any]]:
        """The next ones, with their numbers, up to the one with this number."""
        return [(self.drawn - 1, index) for index in itertools.islice(self, max(0, number - self.drawn))]

    @property
    def are_kept(self) -> bool:
        """Whether there are states of earlier times."""
        return len(self._kept) > 1

    def forget(self, drawn: int) -> None:
        """Nobody will ask how it was before so many were drawn."""
        while len(self._kept) > 1 and self._kept[1].drawn <= drawn:
            self._kept.popleft()

    def after(self, drawn: int, *, is_finished: bool) -> dict[str, Any]:
        """How to go on after `drawn` of them, or some before: text and numbers, but for the sampler's own states."""
        known = next((kept for kept in reversed(self._kept) if kept.drawn <= drawn), None)
        if is_finished:
            known = _Kept(drawn, self._end, False)
        elif known is None:
            known = _Kept(drawn, self._states() if self._first is None else None, False)
        elif known.drawn < drawn == self.drawn:
            known = _Kept(drawn, self._states(), self._is_over)
        drawn, states, is_over = known
        if isinstance(states, PackedError):
            unpacked_states(states)  # raises
        start = (None, None) if is_finished or states is not None else (self._before, self._first)
        return {
            "batches": drawn,
            "samples": drawn * self._outer.batch_size if self._is_plain else None,
            "is_over": is_over,
            "start": [None if state is None else encoded(state) for state in start],
            "states": copy.deepcopy(states),
        }
