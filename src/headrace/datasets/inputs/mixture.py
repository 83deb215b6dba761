"""Mixtures: several streams as one data set, by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from numpy.typing import ArrayLike

from headrace.datasets.base import Operators
from headrace.datasets.inputs.as_they_come import AsTheyCome, by_weight, check_within, has_no_numbers
from headrace.datasets.inputs.forked import check_apart
from headrace.datasets.inputs.joined import check_input, joined
from headrace.datasets.inputs.mix_spec import MixSpec, Weights, checked_weights
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
        streams: Streams by name. If samples of any have no numbers, as after `.filter()` or without an index, they are
            counted as they come: on one rank, with constant weights by samples, and `until="first"`.
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
    pipelines = {name: stream.pipeline() for name, stream in sources.items()}
    if any(has_no_numbers(one) or one.order.passes is not None for one in pipelines.values()):
        return _as_they_come(pipelines, list(sources.values()), weights, by=by, until=until)
    mixed = MixSpec(sources, weights, until or usual[0], step or usual[1], by, given)
    check_apart(mixed.streams, mixed.call)
    for label, pipeline in zip(mixed.labels, mixed.pipelines, strict=True):
        check_input(label, pipeline, mixed.call)
        _check_repeats(label, pipeline)
    return joined(mixed)


def _as_they_come(
    pipelines: Mapping[str, Pipeline], streams: Sequence[Stream], weights: Weights, *, by: str, until: Until | None
) -> Stream:
    """Mix sources of which any has no numbers: the epoch ends where a source that is due has ended.

    Raises:
        OptionError: the arguments need the sources' counts.
    """
    check_apart(streams, "hr.mix")
    for name, pipeline in pipelines.items():
        check_within(f"source {name!r}", pipeline)
    if by != "samples" or until not in (None, "first") or not isinstance(weights, Mapping):
        try:
            for name, pipeline in pipelines.items():
                check_input(f"source {name!r}", pipeline, "hr.mix")
                _check_repeats(f"source {name!r}", pipeline)
        except OptionError as why:
            raise OptionError(
                f"{why}. Otherwise samples are counted as they come, with weights= that are numbers, by='samples' and "
                "until='first'"
            ) from None
    shares = checked_weights(list(pipelines), weights)
    return Stream(AsTheyCome("mix", streams, partial(by_weight, shares), names=list(pipelines)))


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
