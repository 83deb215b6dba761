"""Where a loader's random numbers come from: its generator, its sampler's, or torch's global one; and their states."""

from __future__ import annotations

import base64
import binascii
import contextlib
import zlib
from collections.abc import Iterator

import torch

from headrace.errors import StateMismatchError
from headrace.torch_compat.stateful import chain_of


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

    def __init__(self, generator: torch.Generator | None, sampler: object) -> None:
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


def _generator_of(sampler: object) -> torch.Generator | None:
    generators = (getattr(part, "generator", None) for part in chain_of(sampler))
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)
