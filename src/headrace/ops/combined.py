"""Specification of several streams that form one data set."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from headrace.dataset.source import SampleSource
from headrace.dataset.stream import Stream
from headrace.order import Order
from headrace.order.mixture import TokenMixing
from headrace.pipeline.needs import refusal
from headrace.pipeline.ordering import Ordering
from headrace.pipeline.pipeline import Pipeline


class JoinedSpec(ABC):
    """Several streams that form one data set, with the order of their samples.

    Attributes:
        has_own_numbers: True if samples are requested by their concatenated numbers in the inputs, whatever their
            positions.
        begins_again: True if an exhausted input repeats.
        is_in_turn: True for concatenated inputs, where one window is read at a time.
        adds_names: True if samples get the name of their input.
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
        return tuple(stream.pipeline() for stream in self.streams)

    @property
    def sources(self) -> list[SampleSource]:
        return [pipeline.source for pipeline in self.pipelines]

    @property
    @abstractmethod
    def text(self) -> str: ...

    @property
    @abstractmethod
    def call(self) -> str:
        """The user's call, for messages."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"input {name} of {self.call}" for name in self.names)

    @property
    @abstractmethod
    def is_endless(self) -> bool: ...

    @property
    def is_in_order(self) -> bool:
        """True if samples are in their stored order, input by input."""
        return False

    @property
    def is_paired(self) -> bool:
        """True if a number names a sample of each of several inputs."""
        return False

    @property
    def is_steady(self) -> bool:
        """True if positions mean the same samples, whatever the seed and the epoch."""
        return False

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Number of samples of each input; may make requests."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Total number of samples; may make requests."""

    @property
    @abstractmethod
    def full_count(self) -> int | None:
        """Samples until each input has been used in full, for endless ones. None: not known."""

    @property
    def drawn_by_tokens(self) -> tuple[JoinedSpec, TokenMixing] | None:
        """For a mixture by tokens: its specification for row packing, and token shares."""
        return None

    @property
    @abstractmethod
    def shares(self) -> Sequence[int] | None:
        """Samples of each input in some stretch. None: the shares change."""

    @abstractmethod
    def can_permute(self, by: str) -> bool:
        """True if a shuffle of this kind can change the combined order."""

    def check_order(self, order: Ordering) -> None:
        """Raise OptionError if samples do not support an order."""
        first = next(iter(order.operators), None)
        if self.is_endless and first is not None and not first.is_bound:
            raise refusal("end", f".{first.text}", self.call)

    @abstractmethod
    def described(self) -> str: ...

    @abstractmethod
    def seed_of(self, seed: int, number: int) -> int: ...

    @abstractmethod
    def arrange(self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int) -> Order:
        """Return the combined order.

        Args:
            key: Seed, epoch and pass.
            first_shards: Offset of each input's shard numbers.
            window: Samples in a window.
        """
