"""What several streams are that come as one data set."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from headrace.datasets.ordering import Ordering
from headrace.datasets.pipeline import Pipeline
from headrace.datasets.source import SampleSource
from headrace.datasets.stream import Stream
from headrace.plan import Order
from headrace.plan.token_mixing import TokenMixing


class JoinedSpec(ABC):
    """Several streams that come as one data set, and which one's which sample comes when.

    Attributes:
        names, streams: of the inputs.
        kind: how they are put together, in a word.
        has_own_numbers: whether samples are asked for by the numbers that they have behind one another in the inputs,
            whatever comes at a position.
        begins_again: whether an input begins again where it is used up.
        is_in_turn: whether one comes after the other, so that one window is read at a time.
        adds_names: whether samples are told the name of their input.
    """

    kind: ClassVar[str]
    has_own_numbers: ClassVar[bool] = False
    begins_again: ClassVar[bool] = False
    is_in_turn: ClassVar[bool] = False
    adds_names: ClassVar[bool] = False

    def __init__(self, names: Sequence[str], streams: Sequence[Stream]) -> None:
        self.names, self.streams = tuple(names), tuple(streams)

    @functools.cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Of the streams."""
        return tuple(stream.pipeline() for stream in self.streams)

    @property
    def sources(self) -> list[SampleSource]:
        """What the streams' samples come from."""
        return [pipeline.source for pipeline in self.pipelines]

    @property
    @abstractmethod
    def text(self) -> str:
        """How it is shown."""

    @property
    @abstractmethod
    def call(self) -> str:
        """What the user wrote to make it, for messages."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What messages call each input."""
        return tuple(f"input {name} of {self.call}" for name in self.names)

    @property
    @abstractmethod
    def is_endless(self) -> bool:
        """Whether it has no end."""

    @property
    def is_in_order(self) -> bool:
        """Whether samples come one after the other, as they lie in the inputs."""
        return False

    @property
    def is_steady(self) -> bool:
        """Whether the same samples come at the same positions, whatever the seed and the epoch."""
        return False

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """How many samples each input has; asks them."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many samples come in all; asks how many each input has."""

    @property
    @abstractmethod
    def full_count(self) -> int | None:
        """How many samples come until each input has come in full, where it has no end; None: nobody knows."""

    @property
    def drawn_by_tokens(self) -> tuple[JoinedSpec, TokenMixing] | None:
        """Of a mixture by tokens: (the same as lanes draw on it, how they do); None: it is none."""
        return None

    @property
    @abstractmethod
    def shares(self) -> Sequence[int] | None:
        """How many samples of each input come in some stretch; None: that changes."""

    @abstractmethod
    def check_order(self, order: Ordering, *, in_ranges: bool) -> None:
        """Whether its samples can come in such an order.

        Args:
            order: the order.
            in_ranges: whether they lie in shards that are read in ranges.

        Raises:
            OptionError: they cannot.
        """

    @abstractmethod
    def described(self) -> str:
        """What it is, as a state names it."""

    @abstractmethod
    def seed_of(self, seed: int, number: int) -> int:
        """The seed of one of the inputs, where the loader's is `seed`."""

    @abstractmethod
    def arrange(self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int) -> Order:
        """The order of all.

        Args:
            inputs: the orders of each.
            key: of the seed, of the epoch and the pass.
            first_shards: by how much each input's shards are numbered higher than by itself.
            window: how many samples a window has.
        """
