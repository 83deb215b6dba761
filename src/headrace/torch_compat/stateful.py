"""States of data sets, samplers and generators of torch and the user, and a sampler's indices between two states.

An object is stateful if it has both `state_dict` and `load_state_dict`. Nothing else is required.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any, NamedTuple, Protocol, TypedDict, TypeGuard

import torch
from torch.utils.data import BatchSampler

from headrace._util.lazy import torch_is_loaded
from headrace.errors import StateMismatchError
from headrace.torch_compat import serialize
from headrace.workers.failures import PackedError

_NESTED_MOST = 8

PackedStates = bytes | PackedError
"""Pickled states, or the error raised by `state_dict`."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


States = dict[str, object]
"""States by the role of the object: "dataset", "sampler", "iterator"."""


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """True if an object has a state. The parameters of a module do not count."""
    if torch_is_loaded() and _is_module(thing):
        return False
    try:
        return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    except Exception:  # a property that raises
        return False


def _is_module(thing: object) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module) and type(thing).state_dict is torch.nn.Module.state_dict


def load(thing: object, states: States | None, name: str) -> None:
    """Load an object's entry of `states`, if any, or raise StateMismatchError if not stateful."""
    if not states or name not in states:
        return
    if not is_stateful(thing):
        raise StateMismatchError(
            f"the state has one of the {name}, and {type(thing).__name__} has no load_state_dict", field=name
        )
    thing.load_state_dict(states[name])


def packed_states(dataset: object, iterator: object) -> PackedStates | None:
    """Return the states of a data set and its iterator. None if neither is stateful.

    One object in both roles has one entry. An error does not stop batches: `unpacked_states` raises it.
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
    error.add_note(note)
    return serialize.pack_error(error)


def is_known(packed: PackedStates | None) -> TypeGuard[bytes]:
    return isinstance(packed, bytes)


def unpacked_states(packed: PackedStates | None) -> States | None:
    if packed is None:
        return None
    if isinstance(packed, PackedError):
        raise serialize.unpack_error(packed)
    states: States = serialize.unpack_bytes(packed)
    return states


def chain_of(sampler: object) -> Iterator[Any]:
    """Yield a sampler, the sampler it takes indices from, and so on."""
    for _ in range(_NESTED_MOST):  # objects with a `__getattr__` may never end the chain
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


def parts_of(sampler: object, kinds: tuple[type, ...]) -> Iterator[Any]:
    return (part for part in chain_of(sampler) if isinstance(part, kinds))


def encoded(state: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode("ascii")  # half of the bytes are zero


def decoded(text: str) -> torch.Tensor:
    """Return the generator state of `encoded`'s text, or raise StateMismatchError."""
    try:
        return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise StateMismatchError(f"{text!r:.50} is no state of a generator: {error}", field="generators") from error


class StateSource:
    """Source of random numbers: a generator, or torch's global one (None).

    Loading a state cannot set the global generator, which belongs to the user. If the loaded state differs from the
    global one, draws continue from the loaded state. That ends when the user draws from the global generator or seeds
    it.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self._own: torch.Tensor | None = None
        self._outside: torch.Tensor | None = None  # the global generator's state while `_own` is in use

    def now(self) -> torch.Tensor:
        if self.generator is not None:
            return self.generator.get_state()
        outside = torch.get_rng_state()
        own = self._place(outside)
        return outside if own is None else own

    def go_on(self, state: torch.Tensor) -> None:
        if self.generator is not None:
            self.generator.set_state(state)
        else:
            self._outside = torch.get_rng_state()
            self._own = None if torch.equal(self._outside, state) else state

    def _place(self, outside: torch.Tensor) -> torch.Tensor | None:
        """Return the loaded state, unless the global generator has changed since."""
        if self._own is not None and self._outside is not None and not torch.equal(self._outside, outside):
            self._own = None
        return self._own

    @contextlib.contextmanager
    def drawing(self, at: torch.Tensor | None = None) -> Iterator[None]:
        """Return a context in which torch draws from this source.

        Args:
            at: State to repeat earlier draws from. The global generator is restored afterwards.
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
        """Return a context whose draws have no effect on later ones."""
        before = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        try:
            yield
        finally:
            (torch.set_rng_state if self.generator is None else self.generator.set_state)(before)


class Draws:
    """The sources of a loader's draws: of base seeds and of its sampler. Both may be one."""

    def __init__(self, generator: torch.Generator | None, sampler: object) -> None:
        own = _generator_of(sampler)
        self.base = StateSource(generator)
        self.sampler = self.base if own is generator else StateSource(own)
        self._all = list(dict.fromkeys((self.base, self.sampler)))

    def now(self) -> list[str]:
        return [encoded(source.now()) for source in self._all]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for source in self._all:
                stack.enter_context(source.kept())
            yield

    def go_on(self, states: list[str]) -> None:
        """Continue draws from earlier states, or raise StateMismatchError."""
        if len(states) != len(self._all):
            raise StateMismatchError(
                "generator: the loader, or its sampler, had another one when the state was made", field="generator"
            )
        for source, state in zip(self._all, states, strict=True):
            source.go_on(decoded(state))


def _generator_of(sampler: object) -> torch.Generator | None:
    generators = (getattr(part, "generator", None) for part in chain_of(sampler))
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


class SamplerState(TypedDict):
    batches: int
    samples: int | None
    is_over: bool
    start: list[str | None]
    states: States | None


class _Kept(NamedTuple):
    drawn: int
    states: States | PackedError | None  # PackedError: `state_dict` raised
    is_over: bool


class Indices:
    """Indices of a sampler in one epoch, with states to resume after any of the last ones.

    Without a stateful sampler or iterator a state is a count, and the state of the generator that drew the order.
    torch's own BatchSampler is replaced by its inner sampler.

    Args:
        opened: `iter` of the sampler.
        before: State of `source` before `iter` was called.
        every: Returns after how many indices to request the state of a stateful sampler. 0: only before the first
            index, at the end, and in `after`.
    """

    def __init__(
        self,
        sampler: Iterable[object],
        opened: Iterator[object] | None,
        source: StateSource,
        before: torch.Tensor | None,
        every: Callable[[], int],
    ) -> None:
        self._source, self._every = source, every
        self._batches = sampler if type(sampler) is BatchSampler else None
        self._sampler = sampler if self._batches is None else self._batches.sampler
        self._iterator = opened if self._batches is None else None  # opened lazily, as in torch
        draws_later = self._batches is not None or isinstance(opened, GeneratorType)
        self._before = None if draws_later else before
        self._first: torch.Tensor | None = None  # state of the source when the first index was drawn
        self._waiting: deque[object] = deque()
        self._kept: deque[_Kept] = deque()
        self._end: States | PackedError | None = None  # the states after the end
        self._is_over = False
        self.drawn = 0

    @classmethod
    def resumed(
        cls, sampler: Iterable[object], source: StateSource, loaded: SamplerState, every: Callable[[], int]
    ) -> Indices:
        """Return the indices that follow a state of `after`."""
        before, first = (None if text is None else decoded(text) for text in loaded["start"])
        states = copy.deepcopy(loaded["states"])
        batches = sampler if type(sampler) is BatchSampler else None
        load(sampler if batches is None else batches.sampler, states, "sampler")
        with source.kept() if states is not None else _drawing(source, before):
            opened = iter(sampler) if batches is None else None
        indices = cls(sampler, opened, source, None, every)
        indices._before, indices._first = before, first
        with source.kept() if states is not None else _drawing(source, first):
            indices._go_to(loaded, states)
        return indices

    def _go_to(self, loaded: SamplerState, states: States | None) -> None:
        self.drawn, self._is_over = loaded["batches"], loaded["is_over"]
        if states is not None:
            if self.drawn or "iterator" in states:  # otherwise nothing was drawn yet, and opening it draws
                self._open()
            load(self._iterator, states, "iterator")
            self._kept.append(_Kept(self.drawn, copy.deepcopy(loaded["states"]), self._is_over))
        elif self._first is not None:
            count = self.drawn if loaded["samples"] is None or self._batches is None else loaded["samples"]
            next(itertools.islice(self._open(), count, count), None)
            with contextlib.suppress(StopIteration):  # the order is drawn with the first index
                self._waiting.append(self._draw())

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> object:
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

    def _open(self) -> Iterator[object]:
        if self._iterator is None:
            self._iterator = iter(self._sampler)
        return self._iterator

    def _draw(self) -> object:
        try:
            if self._is_over:  # the previous batch was short
                raise StopIteration
            if self._batches is None:
                return next(self._open())
            size = self._batches.batch_size
            batch = list(itertools.islice(self._open(), size))
            self._is_over = len(batch) < size
            if not batch or (self._is_over and self._batches.drop_last):
                raise StopIteration
        except StopIteration:
            self._is_over = True
            if self._end is None:  # a second request may start the sampler's next epoch
                self._end = self._states()  # the state it carries into that epoch
            raise
        return batch

    def _states(self) -> States | PackedError | None:
        things = {"sampler": self._sampler, "iterator": self._iterator}
        if self._iterator is self._sampler:
            del things["sampler"]
        try:
            states: States = {name: thing.state_dict() for name, thing in things.items() if is_stateful(thing)}
            return copy.deepcopy(states) or None
        except Exception as error:  # indices do not depend on states
            return failed(error, "raised where the state of the sampler was asked for")

    def _keep(self) -> None:
        states = self._states()
        if states is not None:
            self._kept.append(_Kept(self.drawn, states, self._is_over))

    def until(self, number: int) -> list[tuple[int, object]]:
        """Return the next indices with their numbers, up to `number`, exclusively."""
        return [(self.drawn - 1, index) for index in itertools.islice(self, max(0, number - self.drawn))]

    @property
    def are_kept(self) -> bool:
        return len(self._kept) > 1

    def forget(self, drawn: int) -> None:
        """Drop the states that are only needed before `drawn` indices."""
        while len(self._kept) > 1 and self._kept[1].drawn <= drawn:
            self._kept.popleft()

    def after(self, drawn: int, *, is_finished: bool) -> SamplerState:
        """Return the state after `drawn` indices, or the last kept state before."""
        known = next((kept for kept in reversed(self._kept) if kept.drawn <= drawn), None)
        if is_finished:
            known = _Kept(drawn, self._end, False)
        elif known is None:
            known = _Kept(drawn, self._states() if self._first is None else None, False)
        elif known.drawn < drawn == self.drawn:
            known = _Kept(drawn, self._states(), self._is_over)
        drawn, states, is_over = known
        if isinstance(states, PackedError):
            raise serialize.unpack_error(states)
        start = (None, None) if is_finished or states is not None else (self._before, self._first)
        return {
            "batches": drawn,
            "samples": None if self._batches is None else drawn * self._batches.batch_size,
            "is_over": is_over,
            "start": [None if state is None else encoded(state) for state in start],
            "states": copy.deepcopy(states),
        }


def _drawing(source: StateSource, at: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that repeats draws from a state. None: nothing was drawn before."""
    return contextlib.nullcontext() if at is None else source.drawing(at)
