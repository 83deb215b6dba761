"""What a mixture is of, and how it is mixed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.datasets.inputs.spec import JoinedSpec
from headrace.datasets.ordering import Ordering
from headrace.datasets.stream import Stream
from headrace.errors import OptionError
from headrace.functions import name_of
from headrace.plan import Order, draw
from headrace.plan.mixture import ChangingShares, ConstantShares, MixLayout, MixOrder, Until

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | None

_BLOCKS = 2**40  # as many as show shares exactly enough


class MixSpec(JoinedSpec):
    """The sources of a mixture, and how they are mixed.

    Attributes:
        until, step: see `mix`.
    """

    kind = "mix"
    has_own_numbers = True
    begins_again = True
    adds_names = True
    call = "hr.mix"

    def __init__(self, streams: Mapping[str, Stream], weights: Weights, until: Until, step: int) -> None:
        super().__init__(tuple(streams), tuple(streams.values()))
        self.until, self.step = until, step
        self._weights = weights
        if weights is not None and not callable(weights):
            self._checked(weights)

    def __reduce__(self) -> tuple[object, ...]:
        return MixSpec, (dict(zip(self.names, self.streams, strict=True)), self._weights, self.until, self.step)

    @property
    def labels(self) -> tuple[str, ...]:
        """What messages call each source."""
        return tuple(f"source {name!r}" for name in self.names)

    @property
    def is_changing(self) -> bool:
        """Whether the weights are a function of the step."""
        return callable(self._weights)

    @property
    def text(self) -> str:
        """How it is shown."""
        return f"mix({', '.join(self.names)})"

    @property
    def is_endless(self) -> bool:
        """Whether it has no end."""
        return self.until == "forever"

    def check_order(self, order: Ordering, *, in_ranges: bool) -> None:  # noqa: ARG002 (others need it)
        """Whether samples of it can come in such an order.

        Raises:
            OptionError: they cannot.
        """
        names = self.names
        if order.shuffle is not None:
            raise OptionError(
                f"a mixture has an order of its own: shuffle its sources, hr.mix({{{names[0]!r}: data.shuffle(), …}}), "
                "and not what comes of them"
            )
        first = next(iter(order.operators), None)
        if self.is_endless and first is not None and not first.is_bound:
            raise OptionError(
                f"{first.text} of a mixture without end: bound it first, by .take(n) or .epoch(samples=N)"
            )

    @property
    def sizes(self) -> Sequence[int]:
        """How many samples each source has until it begins again."""
        return self.layout.sizes

    @property
    def count(self) -> int:
        """How many samples come in all."""
        return self.layout.count

    @property
    def full_count(self) -> int | None:
        """How many samples come until each source has come in full; None: nobody knows."""
        if self.is_changing:
            return None
        counts = self.layout.before(_BLOCKS)
        return max(-(-size * sum(counts) // some) for size, some in zip(self.sizes, counts, strict=True) if some)

    @property
    def shares(self) -> Sequence[int] | None:
        """How many samples of each source come in a step; None: that changes."""
        return None if self.is_changing else self.layout.before(1)

    def seed_of(self, seed: int, number: int) -> int:
        """The seed of a source: else those of one size had one order."""
        return draw("source", seed, self.names[number])

    def arrange(
        self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int
    ) -> MixOrder:
        """The order of all."""
        return MixOrder(inputs, self.layout, key, first_shards, window)

    @functools.cached_property
    def layout(self) -> MixLayout:
        """How many samples of each come when; asks how many each has."""
        sizes = [len(stream) for stream in self.streams]
        weights = self._weights
        if callable(weights):
            asked: Callable[[int], Mapping[str, float]] = weights
            by_step = lambda step: self._checked(asked(step), f" at step {step}")
            return MixLayout(sizes, ChangingShares(by_step, len(sizes), self.step), self.until)
        parts = sizes if weights is None else self._checked(weights)
        self._check_not_empty(sizes, parts)
        return MixLayout(sizes, ConstantShares(parts, self.step), self.until)

    def described(self) -> str:
        """The mixture as a state names it."""
        weights = self._weights
        shares = "sizes"
        if callable(weights):
            shares = name_of(weights)
        elif weights is not None:
            shares = ":".join(f"{weight:.12g}" for weight in self._checked(weights))
        return f"mix({', '.join(self.names)}; weights={shares}, until={self.until}, step={self.step})"

    def _checked(self, weights: object, when: str = "") -> list[float]:
        """The weights in the order of the sources."""
        if not isinstance(weights, Mapping) or set(weights) != set(self.names):
            raise OptionError(
                f"weights{when} are {weights!r:.200}: a number for each of {', '.join(self.names)} is needed"
            )
        for name, weight in weights.items():
            if not isinstance(weight, (int, float, np.integer, np.floating)) or not math.isfinite(weight) or weight < 0:
                raise OptionError(f"the weight of {name!r}{when} is {weight!r}: weights are finite and not negative")
        if not any(weights.values()):
            raise OptionError(f"all weights{when} are 0: at least one must be larger")
        return [weight if type(weight) is int else float(weight) for weight in (weights[name] for name in self.names)]

    def _check_not_empty(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        for name, size, weight in zip(self.names, sizes, weights, strict=True):
            if weight and not size:
                raise OptionError(f"source {name!r} of the mixture has no samples: leave it out, or give it weight 0")
