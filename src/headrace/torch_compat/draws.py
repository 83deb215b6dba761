"""Random sources of a loader, and their states."""

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
