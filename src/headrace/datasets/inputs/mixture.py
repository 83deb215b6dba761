"""Mixtures: several streams whose samples come by weight, as one data set."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import ArrayLike

from headrace.datasets.base import Operators
from headrace.datasets.inputs.forked import check_apart
from headrace.datasets.inputs.joined import check_input, joined
from headrace.datasets.inputs.mix_spec import MixSpec, Weights
from headrace.datasets.lengths import checked_lengths
from headrace.datasets.pipeline import Pipeline
from headrace.datasets.stream import Stream
from headrace.errors import OptionError
from headrace.plan.mixture import Until
from headrace.types import Ints

_STEP_SAMPLES = 1024
_STEP_TOKENS = 2**20


def mix(
    streams: Mapping[str, Operators],
    weights: Weights = None,
    *,
    by: str = "samples",
    until: Until | None = None,
    step: int | None = None,
    lengths: Mapping[str, ArrayLike] | None = None,
) -> Stream:
    """The samples of several streams as one, by weight; those that are dicts say under `__source__` which one they are
    of.

    Which sample comes at which position depends on the seed, the epoch and the position alone, as with any stream whose
    samples have numbers. Sources keep their own order and their own steps: shuffle each of them, before they are mixed.
    Where one is used up it begins again, in another order if it is shuffled. Their shares are kept within a sample in
    all, and within some two samples in each batch.

    By tokens, lengths of all documents are known, or `.pack()` is to follow. Where they are known, which document comes
    at which position follows from them, as it does by samples: shares are kept within half a document of each source,
    and all may follow that does behind others, such as `.padded_batch()`. They are those of the documents as they lie:
    what steps make of these is not counted.

    Where `.pack()` follows, it does with nothing between but what is done to each document: `.map()`, `.filter()`,
    `.flat_map()`, `.tokenize()`. Each row of the global batch draws its documents from the sources by how many tokens
    it has drawn of each, so that the batches are the same on any ranks and workers, and go on anywhere. Behind many
    tokens the shares are out by about a document of each row and source. `loader.stats().tokens` says what they are.
    A source that is used up begins again.

    Args:
        streams: by name. Their samples have numbers: shards need an index. They are neither filtered (but by keys that
            an index knows) nor batched: do both with what comes of this.
        weights: for each name a number, relative to the others. None: each sample comes once. A function of the step:
            it is given the step's number, from 0 in each epoch, and gives such numbers. It is asked once for each step,
            in the process of the loader, and must give the same for the same step whenever it is asked: a state
            that was saved with others is refused. It may be asked for a step behind the last one.
        by: "samples": weights are those of samples. "tokens": they are those of tokens; see above.
        until: "first": the epoch ends before the first sample that would come again. "all": it ends when each source
            has come in full. "forever": it has no end; `.epoch(samples=N)` or `.take(n)` bound it. None: "first", or
            "forever" by tokens, where nothing else can be had.
        step: samples of a step, of all ranks together. Where one ends and the next one begins may be out by as many
            samples as there are sources. Shares that do not change are planned in such steps, too. By tokens it is as
            many tokens of documents, of all ranks together, and some document of each lane may be out. None: 1,024
            samples, or 1,048,576 tokens.
        lengths: by tokens, and where no `.pack()` follows: for each source, how many tokens each of its documents has,
            by its number in the source; an array that was saved when they were tokenized, or a column. Sources that
            know it, as `hr.tokens(…, documents="samples")`, may be left out.

    Raises:
        OptionError: a source or an argument cannot be used.

    Examples:
        >>> import headrace as hr
        >>> web, code = hr.from_map([{"n": n} for n in range(60)]), hr.from_map([{"n": n} for n in range(20)])
        >>> data = hr.mix({"web": web.shuffle(), "code": code.shuffle()}, {"web": 0.75, "code": 0.25})
        >>> [batch["__source__"].count("code") for batch in hr.DataLoader(data, batch_size=20)]
        [5, 5, 5, 5]
    """
    _check_arguments(streams, weights, by, until, step)
    given = _checked_lengths(streams, by, lengths)
    usual: tuple[Until, int] = ("forever", _STEP_TOKENS) if by == "tokens" else ("first", _STEP_SAMPLES)
    sources = {}
    for name, stream in streams.items():
        if not isinstance(stream, Operators):
            raise OptionError(f"source {name!r} is a {type(stream).__name__}, no stream or data set of headrace's")
        sources[name] = stream._as_stream()
    mixed = MixSpec(sources, weights, until or usual[0], step or usual[1], by, given)
    check_apart(mixed.streams, mixed.call)
    for label, pipeline in zip(mixed.labels, mixed.pipelines, strict=True):
        check_input(label, pipeline, mixed.call)
        _check_repeats(label, pipeline)
    return joined(mixed)


def _check_arguments(streams: object, weights: object, by: object, until: object, step: object) -> None:
    if by not in ("samples", "tokens"):
        raise OptionError(f"by={by!r}: 'samples' or 'tokens' is meant")
    if until not in (None, "first", "all", "forever"):
        raise OptionError(f"until={until!r}: 'first', 'all' or 'forever' is meant")
    if step is not None and (not isinstance(step, int) or step < 1):
        raise OptionError(f"step={step!r}: a step has 1 sample or more, or 1 token or more")
    if by == "tokens" and until not in (None, "forever"):
        raise OptionError(
            f"by='tokens' and until={until!r}: nobody knows before documents are read how many come until then; leave "
            "it out, and put .epoch(samples=N) behind .pack(), or behind the mixture where lengths are known"
        )
    if by == "tokens" and weights is None:
        raise OptionError("by='tokens' needs weights=: the share of the tokens that each source is to have")
    if not isinstance(streams, Mapping) or not streams or not all(isinstance(name, str) for name in streams):
        raise OptionError(f"hr.mix({streams!r:.200}): streams by their names are needed")
    if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
        raise OptionError(f"weights={weights!r:.200}: a number for each name is needed, or a function of the step")


def _checked_lengths(streams: Mapping[str, object], by: str, lengths: object) -> dict[str, Ints]:
    """How many tokens documents have, by the sources' names."""
    if lengths is None:
        return {}
    if by != "tokens":
        raise OptionError("lengths= is about by='tokens': by samples, each counts once")
    if not isinstance(lengths, Mapping) or not {*lengths} <= {*streams}:
        raise OptionError(f"lengths={lengths!r:.200}: an array for each of {', '.join(streams)} is meant")
    return {name: checked_lengths(given, f"lengths[{name!r}] of hr.mix") for name, given in lengths.items()}


def _check_repeats(label: str, pipeline: Pipeline) -> None:
    if pipeline.order.passes is not None:
        raise OptionError(f"{label} is repeated: until= and weights= of hr.mix say how often its samples come")
