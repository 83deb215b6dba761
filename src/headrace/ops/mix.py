"""Mixtures: several streams as one data set, by weight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import ArrayLike

from headrace._util import check
from headrace._util.functions import name_of
from headrace.dataset.source import SampleSource
from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.ops.combined import CombinedSpec, check_apart, check_input, combined, input_stream
from headrace.ops.inputs import TurnsDataset, check_within, has_no_numbers
from headrace.ops.pack import checked_lengths
from headrace.order.combined import (
    ChangingShares,
    ConstantShares,
    InterleaveLayout,
    InterleaveOrder,
    MixLayout,
    MixOrder,
    Shares,
    TokenMixing,
    TokenOrder,
    Until,
)
from headrace.order.orders import ENDLESS, Order, Places
from headrace.order.permutation import draw
from headrace.pipeline.pipeline import Ordering, Pipeline, refusal
from headrace.types import Ints

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | None

_STEP_SAMPLES = 1024
_STEP_TOKENS = 2**20
_BLOCKS = 2**40  # enough blocks to measure shares exactly


def mix(
    streams: Mapping[str, object],
    weights: Weights = None,
    *,
    by: str = "samples",
    until: Until | None = None,
    step: int | None = None,
    lengths: Mapping[str, ArrayLike] | None = None,
) -> Stream:
    """Mix the samples of several streams by weight.

    Samples that are dicts get the name of their stream as `__source__`. The sample at a position depends only on the
    seed, the epoch and the position, as in any stream whose samples have numbers. Sources keep their own order and
    steps, so shuffle each of them before mixing. An exhausted source repeats, in a new order if it is shuffled. Shares
    are exact within one sample in total, and within about two samples in each batch.

    By tokens, either the lengths of all documents are known, or `.pack()` must follow. With known lengths, the order of
    documents follows from the lengths. Shares are exact within half a document of each source, and any operators may
    follow, such as `.padded_batch()`. The lengths are those of the stored documents; changes by steps are not counted.

    Before a following `.pack()`, only operators on single documents are allowed: `.map()`, `.filter()`, `.flat_map()`,
    `.tokenize()`. Each row of the global batch draws documents according to the tokens it has drawn from each source.
    So batches do not depend on ranks and workers, and states can be loaded anywhere. After many tokens, shares are
    exact within about one document of each row and source. `loader.stats().tokens` reports them. An exhausted source
    repeats.

    Args:
        streams: Streams by name; a list or another map-style data set is read as by `hr.from_map`. If samples of any
            have no numbers, as after `.filter()`, they are counted as they come: on one rank, with constant weights by
            samples, and `until="first"`. Otherwise an index is made of shards that have none.
        weights: A relative weight for each name. None: each sample occurs once. Or a function from the number of a
            step, from 0 in each epoch, to such weights. The function is called once per step, in the loader's process,
            and must be deterministic: a state saved with other weights is refused. It may be called for one step after
            the last.
        by: "samples": weights count samples. "tokens": weights count tokens; see above.
        until: "first": the epoch ends before the first sample that would repeat. "all": it ends when each source has
            been used in full. "forever": it is endless; limit it by `.epoch(samples=N)` or `.take(n)`. None: "first",
            or "forever" by tokens, where nothing else is possible.
        step: Samples of a step, over all ranks. The border between steps may shift by as many samples as there are
            sources. Constant shares are planned in such steps, too. By tokens: tokens of documents, over all ranks; the
            border may shift by a document of each row. None: 1,024 samples, or 1,048,576 tokens.
        lengths: By tokens, without `.pack()`: for each source, an array of its documents' token counts, by number in
            the source, for instance saved during tokenization, or a column. Sources that know their lengths, such as
            `hr.tokens(…, documents="samples")`, may be omitted.

    Raises:
        OptionError: A source or an argument is not supported.

    Examples:
        >>> web, code = hr.from_map([{"n": n} for n in range(60)]), hr.from_map([{"n": n} for n in range(20)])
        >>> data = hr.mix({"web": web.shuffle(), "code": code.shuffle()}, {"web": 0.75, "code": 0.25})
        >>> [batch["__source__"].count("code") for batch in hr.DataLoader(data, batch_size=20)]
        [5, 5, 5, 5]
    """
    _check_arguments(streams, weights, by, until, step)
    given = _checked_lengths(streams, by, lengths)
    usual: tuple[Until, int] = ("forever", _STEP_TOKENS) if by == "tokens" else ("first", _STEP_SAMPLES)
    sources = {name: input_stream(f"source {name!r}", data) for name, data in streams.items()}
    needs_numbers = by != "samples" or until not in (None, "first") or weights is None or callable(weights)
    if needs_numbers:
        sources = {name: stream.indexed(f"hr.mix needs, for source {name!r},") for name, stream in sources.items()}
    pipelines = {name: stream.pipeline() for name, stream in sources.items()}
    if any(has_no_numbers(one) or one.order.passes is not None for one in pipelines.values()):
        return _as_they_come(pipelines, list(sources.values()), weights, needs_numbers=needs_numbers)
    mixed = MixSpec(sources, weights, until or usual[0], step or usual[1], by, given).checked()
    for label, pipeline in zip(mixed.labels, mixed.pipelines, strict=True):
        _check_repeats(label, pipeline)
    return combined(mixed)


def _as_they_come(
    pipelines: Mapping[str, Pipeline], streams: Sequence[Stream], weights: Weights, *, needs_numbers: bool
) -> Stream:
    """Mix sources, some without numbers. The epoch ends when a source that is due has ended."""
    check_apart(streams, "hr.mix")
    for name, pipeline in pipelines.items():
        check_within(f"source {name!r}", pipeline, "hr.mix")
    if needs_numbers:
        try:
            for name, pipeline in pipelines.items():
                check_input(f"source {name!r}", pipeline, "hr.mix")
                _check_repeats(f"source {name!r}", pipeline)
        except OptionError as why:
            why.add_note("With numeric weights=, by='samples', until='first', samples are counted as they come instead")
            raise
    shares = checked_weights(list(pipelines), weights)
    names = list(pipelines)
    turn, again = partial(by_weight, shares), partial(_mixed, names, weights)
    arguments = [":".join(f"{share:.12g}" for share in shares)]
    return Stream(TurnsDataset("mix", streams, turn, again, arguments=arguments, names=names))


def _mixed(names: Sequence[str], weights: Weights, streams: Sequence[Stream]) -> Stream:
    return mix(dict(zip(names, streams, strict=True)), weights)


class MixSpec(CombinedSpec):
    """The sources of a mixture, and their shares; see `mix`.

    Attributes:
        by_rows: True if the packed rows of `.pack()` draw documents from the sources.
    """

    kind = "mix"
    has_own_numbers = True
    begins_again = True
    adds_names = True
    is_steady = False
    call = "hr.mix"

    def __init__(
        self,
        streams: Mapping[str, Stream],
        weights: Weights,
        until: Until,
        step: int,
        by: str = "samples",
        lengths: Mapping[str, Ints] | None = None,
        by_rows: bool = False,
    ) -> None:
        super().__init__(tuple(streams.values()), tuple(streams))
        self.lengths = lengths or {}
        self.until, self.step, self.by, self.by_rows = until, step, by, by_rows
        self._weights = weights
        if weights is not None and not callable(weights):
            checked_weights(self.names, weights)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"source {name!r}" for name in self.names)

    @property
    def is_changing(self) -> bool:
        return callable(self._weights)

    @property
    def is_planned(self) -> bool:
        """True if the mixture is by tokens, and the token count of each document is known."""
        return self.by == "tokens" and not self.by_rows and not self._unknown

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

    def can_permute(self, by: str) -> bool:
        return False

    def check_order(self, order: Ordering) -> None:
        first = next(iter(order.operators), None)
        if first is not None and self.by == "tokens" and not self.is_planned:
            remedy = "apply it to the sources, or after .pack(), or give the lengths: hr.mix(…, lengths=…)"
            raise refusal("numbers", f".{first.text}", "hr.mix(…, by='tokens')", remedy=remedy)
        super().check_order(order)

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
        """Return the order of the mixture."""
        if self.by_rows:
            self._check_not_empty()
            turns = InterleaveLayout([ENDLESS] * len(inputs), 1)  # positions for the rows to draw from
            return InterleaveOrder(inputs, turns, first_shards, window)
        if self.by == "tokens":
            return self._planned_by_tokens(inputs, first_shards, window)
        return MixOrder(inputs, self.layout, key, first_shards, window)

    def _planned_by_tokens(self, inputs: Sequence[Order], first_shards: Sequence[int], window: int) -> Order:
        if self._unknown:
            raise check.lacking(
                self.text,
                f"the lengths of the documents of {self._unknown[0]} before they are read: give lengths={{…}}, or put "
                ".pack(length) after the mixture (and .map(), .filter() or .tokenize() between), or mix by samples",
            )
        self._check_not_empty()
        lengths = map(self._lengths_at, self.names, self.labels, self.sources)
        return TokenOrder(inputs, self._counts, [*lengths], self._shares, self.labels, first_shards, window)

    @cached_property
    def layout(self) -> MixLayout:
        """The plan of each source's samples; may make requests for their numbers."""
        shares = self._shares
        self._check_not_empty()
        return MixLayout(self._counts, shares, self.until)

    @cached_property
    def _lengths_digest(self) -> str:
        """Digest of the given lengths. Lengths known to sources are in their fingerprints."""
        digest = hashlib.blake2b(digest_size=8)
        for name in self.names:
            if name in self.lengths:
                digest.update(f"{name} {len(self.lengths[name])} ".encode("utf-8", "surrogateescape"))
                digest.update(self.lengths[name].astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _counts(self) -> list[int]:
        return [len(stream) for stream in self.streams]

    def _lengths_at(self, name: str, label: str, source: SampleSource) -> Callable[[Places], Ints]:
        given = self.lengths.get(name)
        lengths, starts = source.lengths() if given is None else given, source.starts
        if len(lengths) != starts[-1]:
            raise check.unequal(f"lengths= of {label}", f"{len(lengths)} values", label, f"{starts[-1]} documents")
        return lambda places: lengths[starts[places.shards] + places.rows]

    @cached_property
    def _shares(self) -> Shares:
        weights = self._weights
        if callable(weights):
            return ChangingShares(self._weights_at, len(self.names), self.step)
        return ConstantShares(self._counts if weights is None else checked_weights(self.names, weights), self.step)

    def _weights_at(self, step: int) -> list[float]:
        assert callable(self._weights)
        return checked_weights(self.names, self._weights(step), f" at step {step}")

    @property
    def drawn_by_tokens(self) -> tuple[MixSpec, TokenMixing] | None:
        if self.by != "tokens" or self._weights is None:
            return None
        if self.lengths:
            raise check.conflict(".pack()", f"{self.call}(…, lengths=…)", "leave lengths= out, as rows count tokens")
        streams = dict(zip(self.names, self.streams, strict=True))
        spec = MixSpec(streams, self._weights, self.until, self.step, self.by, by_rows=True)
        return spec, TokenMixing(self.names, spec._shares)

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
                raise check.empty(f"source {name!r} of the mixture", "samples", "leave it out, or give it weight 0")


def checked_weights(names: Sequence[str], weights: object, when: str = "") -> list[float]:
    """Return the weights in the order of the sources."""
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise check.invalid(f"hr.mix(): weights{when}", weights, f"a number for each of {', '.join(names)}")
    for name, weight in weights.items():
        if not isinstance(weight, (int, float, np.integer, np.floating)) or not math.isfinite(weight) or weight < 0:
            raise check.invalid(f"hr.mix(): weights{when}[{name!r}]", weight, "a finite number, 0 or more")
    if not any(weights.values()):
        raise check.invalid(f"hr.mix(): weights{when}", weights, "numbers, one of them above 0")
    return [weight if type(weight) is int else float(weight) for weight in (weights[name] for name in names)]


def _check_arguments(streams: object, weights: object, by: object, until: object, step: object) -> None:
    check.one_of("hr.mix(): by", by, ("samples", "tokens"))
    check.one_of("hr.mix(): until", until, (None, "first", "all", "forever"))
    check.whole_or_none("hr.mix(): step", step, 1)
    if by == "tokens" and until not in (None, "forever"):
        remedy = "use .epoch(samples=N) after .pack(), or after the mixture if lengths are known"
        raise check.conflict("by='tokens'", f"until={until!r}", remedy)
    if by == "tokens" and weights is None:
        raise check.lacking("by='tokens'", "weights=, the share of the tokens of each source")
    if not isinstance(streams, Mapping) or not streams or not all(isinstance(name, str) for name in streams):
        raise check.invalid("hr.mix(): streams", streams, "a dict of streams by their names")
    if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
        raise check.invalid("hr.mix(): weights", weights, "a number for each name, or a function of the step")


def _checked_lengths(streams: Mapping[str, object], by: str, lengths: object) -> dict[str, Ints]:
    if lengths is None:
        return {}
    if by != "tokens":
        raise check.lacking("lengths=", "by='tokens'")
    if not isinstance(lengths, Mapping) or not {*lengths} <= {*streams}:
        raise check.invalid("hr.mix(): lengths", lengths, f"a dict of an array for each of {', '.join(streams)}")
    return {name: checked_lengths(given, f"hr.mix(): lengths[{name!r}]") for name, given in lengths.items()}


def _check_repeats(label: str, pipeline: Pipeline) -> None:
    if pipeline.order.passes is not None:
        remedy = "until= and weights= set how often its samples come"
        raise check.conflict(f".{pipeline.order.passes.text} of {label}", "hr.mix", remedy)


def by_weight(weights: Sequence[float], taken: Sequence[int], ended: Sequence[bool]) -> Sequence[int]:
    """Choose the input that lacks most of its share. The end is where that input has ended."""
    number, total = sum(taken) + 1, sum(weights)
    k = max(range(len(taken)), key=lambda k: (weights[k] / total * number - taken[k], -k))
    return [] if ended[k] else [k]
