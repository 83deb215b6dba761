"""Specification of a mixture: its sources and their shares."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.datasets.inputs.spec import JoinedSpec
from headrace.datasets.ordering import Ordering
from headrace.datasets.source import SampleSource
from headrace.datasets.stream import Stream
from headrace.errors import OptionError
from headrace.functions import name_of
from headrace.plan import Order, Places, draw
from headrace.plan.mixture import ChangingShares, ConstantShares, MixLayout, MixOrder, Shares, Until
from headrace.plan.order import ENDLESS
from headrace.plan.token_mixing import InputTurns, TokenMixing
from headrace.plan.token_order import TokenOrder
from headrace.types import Ints

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | None

_BLOCKS = 2**40  # enough blocks to measure shares exactly


class MixSpec(JoinedSpec):
    """The sources of a mixture, and their shares; see `mix`.

    Attributes:
        in_lanes: True if the rows of `.pack()` draw documents from the sources.
    """

    kind = "mix"
    has_own_numbers = True
    begins_again = True
    adds_names = True
    call = "hr.mix"

    def __init__(
        self,
        streams: Mapping[str, Stream],
        weights: Weights,
        until: Until,
        step: int,
        by: str = "samples",
        lengths: Mapping[str, Ints] | None = None,
        in_lanes: bool = False,
    ) -> None:
        super().__init__(tuple(streams), tuple(streams.values()))
        self.lengths = lengths or {}
        self.until, self.step, self.by, self.in_lanes = until, step, by, in_lanes
        self._weights = weights
        if weights is not None and not callable(weights):
            checked_weights(self.names, weights)

    def __reduce__(self) -> tuple[object, ...]:
        streams = dict(zip(self.names, self.streams, strict=True))
        return MixSpec, (streams, self._weights, self.until, self.step, self.by, self.lengths, self.in_lanes)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"source {name!r}" for name in self.names)

    @property
    def is_changing(self) -> bool:
        return callable(self._weights)

    @property
    def is_planned(self) -> bool:
        """True if the mixture is by tokens, and the token count of each document is known."""
        return self.by == "tokens" and not self.in_lanes and not self._unknown

    @property
    def _unknown(self) -> list[str]:
        """Labels of the sources whose documents have no known lengths."""
        some = zip(self.names, self.labels, self.sources, strict=True)
        return [label for name, label, source in some if name not in self.lengths and not source.has_lengths]

    @property
    def text(self) -> str:
        return f"mix({', '.join(self.names)}{', by=tokens' if self.by == 'tokens' else ''})"

    @property
    def is_endless(self) -> bool:
        return self.until == "forever"

    def check_order(self, order: Ordering, *, in_ranges: bool) -> None:  # noqa: ARG002 (others need it)
        names = self.names
        if order.shuffle is not None:
            raise OptionError(
                f"a mixture has an order of its own: shuffle its sources, hr.mix({{{names[0]!r}: data.shuffle(), …}}), "
                "and not what comes of them"
            )
        first = next(iter(order.operators), None)
        if first is not None and self.by == "tokens" and not self.is_planned:
            raise OptionError(
                f".{first.text} of a mixture by tokens: which documents come is known once they are read; do it to its "
                "sources, or behind .pack(), or say how long they are: hr.mix(…, lengths=…)"
            )
        if self.is_endless and first is not None and not first.is_bound:
            raise OptionError(
                f"{first.text} of a mixture without end: bound it first, by .take(n) or .epoch(samples=N)"
            )

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each source until it repeats."""
        return self._counts if self.by == "tokens" else self.layout.sizes

    @property
    def count(self) -> int:
        return ENDLESS if self.by == "tokens" else self.layout.count

    @property
    def full_count(self) -> int | None:
        if self.by == "tokens":
            return sum(self._counts)  # an estimate: by then each source has contributed tokens
        if self.is_changing:
            return None
        counts = self.layout.before(_BLOCKS)
        return max(-(-size * sum(counts) // some) for size, some in zip(self.sizes, counts, strict=True) if some)

    @property
    def shares(self) -> Sequence[int] | None:
        return None if self.is_changing or self.by == "tokens" else self.layout.before(1)

    def seed_of(self, seed: int, number: int) -> int:
        """Return the seed of a source, so that sources of equal size get different orders."""
        return draw("source", seed, self.names[number])

    def arrange(self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int) -> Order:
        """Return the order of the mixture.

        Raises:
            OptionError: It is by tokens, and lengths of documents are unknown.
        """
        if self.in_lanes:
            self._check_not_empty()
            return InputTurns(inputs, first_shards, window)
        if self.by == "tokens":
            return self._planned_by_tokens(inputs, first_shards, window)
        return MixOrder(inputs, self.layout, key, first_shards, window)

    def _planned_by_tokens(self, inputs: Sequence[Order], first_shards: Sequence[int], window: int) -> Order:
        if self._unknown:
            raise OptionError(
                f"{self.text}: how many tokens documents of {self._unknown[0]} have is known once they are read, in "
                "the lanes of .pack(): put .pack(length) behind the mixture (and .map(), .filter() or .tokenize() "
                "between), or say it: hr.mix(…, lengths={…}), or mix by samples"
            )
        self._check_not_empty()
        assert self._weights is not None
        lengths = map(self._lengths_at, self.names, self.labels, self.sources)
        shares = self._shares(self._weights)
        return TokenOrder(inputs, self._counts, [*lengths], shares, self.labels, first_shards, window)

    @functools.cached_property
    def layout(self) -> MixLayout:
        """The plan of each source's samples; may make requests for their numbers."""
        if self._weights is None:
            shares: Shares = ConstantShares(self._counts, self.step)
        else:
            shares = self._shares(self._weights)
            self._check_not_empty()
        return MixLayout(self._counts, shares, self.until)

    @functools.cached_property
    def _lengths_digest(self) -> str:
        """Digest of the given lengths. Lengths known to sources are in their fingerprints."""
        digest = hashlib.blake2b(digest_size=8)
        for name in self.names:
            if name in self.lengths:
                digest.update(f"{name} {len(self.lengths[name])} ".encode("utf-8", "surrogateescape"))
                digest.update(self.lengths[name].astype("<i8").tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _counts(self) -> list[int]:
        return [len(stream) for stream in self.streams]

    def _lengths_at(self, name: str, label: str, source: SampleSource) -> Callable[[Places], Ints]:
        given = self.lengths.get(name)
        lengths, starts = source.lengths() if given is None else given, source.starts
        if len(lengths) != starts[-1]:
            raise OptionError(f"lengths= of {label}: there are {len(lengths)} of them, and {starts[-1]} documents")
        return lambda places: lengths[starts[places.shards] + places.rows]

    def _shares(self, weights: Mapping[str, float] | Callable[[int], Mapping[str, float]]) -> Shares:
        if callable(weights):
            return ChangingShares(self._weights_at, len(self.names), self.step)
        return ConstantShares(checked_weights(self.names, weights), self.step)

    def _weights_at(self, step: int) -> list[float]:
        assert callable(self._weights)
        return checked_weights(self.names, self._weights(step), f" at step {step}")

    @property
    def drawn_by_tokens(self) -> tuple[MixSpec, TokenMixing] | None:
        if self.by != "tokens" or self._weights is None:
            return None
        if self.lengths:
            raise OptionError(f".pack() behind {self.call}(…, lengths=…): its rows count tokens; leave lengths= out")
        streams = dict(zip(self.names, self.streams, strict=True))
        spec = MixSpec(streams, self._weights, self.until, self.step, self.by, in_lanes=True)
        return spec, TokenMixing(self.names, spec._shares(self._weights))

    def described(self) -> str:
        weights = self._weights
        shares = "sizes"
        if callable(weights):
            shares = name_of(weights)
        elif weights is not None:
            shares = ":".join(f"{weight:.12g}" for weight in checked_weights(self.names, weights))
        by = ", by=tokens" if self.by == "tokens" else ""
        if self.is_planned:
            by += f", lengths={self._lengths_digest}"
        return f"mix({', '.join(self.names)}; weights={shares}, until={self.until}, step={self.step}{by})"

    def _check_not_empty(self) -> None:
        weights = self._weights
        for name, size in zip(self.names, self._counts, strict=True):
            is_to_come = self.by == "tokens" if callable(weights) else weights is not None and weights[name]
            if is_to_come and not size:
                raise OptionError(f"source {name!r} of the mixture has no samples: leave it out, or give it weight 0")


def checked_weights(names: Sequence[str], weights: object, when: str = "") -> list[float]:
    """Return the weights in the order of the sources.

    Raises:
        OptionError: they are not a number for each source.
    """
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise OptionError(f"weights{when} are {weights!r:.200}: a number for each of {', '.join(names)} is needed")
    for name, weight in weights.items():
        if not isinstance(weight, (int, float, np.integer, np.floating)) or not math.isfinite(weight) or weight < 0:
            raise OptionError(f"the weight of {name!r}{when} is {weight!r}: weights are finite and not negative")
    if not any(weights.values()):
        raise OptionError(f"all weights{when} are 0: at least one must be larger")
    return [weight if type(weight) is int else float(weight) for weight in (weights[name] for name in names)]
