"""Checks whether ranks can share samples, and resume from states of other ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headrace._util import check
from headrace.dataset.source import SampleSource
from headrace.dataset.stream import Stream
from headrace.errors import OptionError, StateMismatchError
from headrace.pipeline.pipeline import Pipeline
from headrace.types import Tail

log = logging.getLogger("headrace")

_ALL = "give the loader shard=False, and every rank all samples"


def has_numbers(pipeline: Pipeline, world: int) -> bool:
    """True if samples have numbers, as far as `world` ranks need them."""
    is_shared = world > 1 and pipeline.source.traits.indexed
    return (pipeline.is_by_number or pipeline.source.divides()) if is_shared else pipeline.has_numbers


def has_counts(pipeline: Pipeline, world: int) -> bool:
    """True if ranks share shards by the counts of an index, and read each shard from its start.

    Each rank then reads one contiguous part of the epoch, and skips the samples before it in its first shard.
    """
    is_read_as_it_lies = pipeline.source.traits.indexed and not has_numbers(pipeline, world)
    return world > 1 and is_read_as_it_lies and pipeline.keeps_count and not pipeline.is_endless


def divided(stream: Stream, world: int, tail: Tail) -> Stream:
    """Return the stream, with an index if several ranks need one to share it.

    Raises:
        OptionError: ranks cannot share it; the message describes the alternatives.
    """
    stream = _shared(_counted(stream, world, tail), world, tail)
    pipeline = stream.pipeline()
    if pipeline.unshardable is not None:
        raise OptionError(
            f".{pipeline.unshardable} has is_shardable=False: it must see all samples, and {world} ranks would each "
            f"give it some of them; {_ALL}"
        )
    if pipeline.numbered is not None and not has_numbers(pipeline, world):
        raise OptionError(
            f".{pipeline.numbered.name} of {stream!r}: {world} ranks read samples of their own, and none of them knows "
            f"how many come before those on the others: make an index (headrace index URL…), or {_ALL}"
        )
    return stream


def _counted(stream: Stream, world: int, tail: Tail) -> Stream:
    """Return the stream, with an index if that lets ranks share it by number, or by the counts of shards."""
    pipeline = stream.pipeline()
    are_counted = pipeline.keeps_count and not pipeline.is_endless and tail != "uneven"
    if pipeline.passes[1] is not None or (pipeline.source.is_compressed and not are_counted):
        return stream
    return stream.indexed(f"{world} ranks share")


def _shared(stream: Stream, world: int, tail: Tail) -> Stream:
    pipeline = stream.pipeline()
    source = pipeline.source
    if source.traits.iterated:
        _check_iterable(source, world)
    is_known = (has_numbers(pipeline, world) and pipeline.keeps_count) or has_counts(pipeline, world)
    if is_known or (pipeline.is_endless and not _limits(pipeline)):
        return stream
    if tail == "uneven":
        _check_uneven(pipeline, world)
    elif pipeline.given_count is None:
        raise _uncounted(stream, world)
    return stream


def _limits(pipeline: Pipeline) -> bool:
    """True if a limit applies to samples counted as they come."""
    return pipeline.limit is not None or pipeline.is_limited_within


def _check_uneven(pipeline: Pipeline, world: int) -> None:
    """Raise OptionError if ranks that end independently would have to count samples together."""
    is_bounded = pipeline.order.most is not None and not has_numbers(pipeline, world)
    if is_bounded or _limits(pipeline):
        remedy = f"each of {world} ranks ends with its own data"
        raise check.conflict("tail='uneven'", ".epoch() or .take(), which count the samples of all ranks,", remedy)


def _uncounted(stream: Stream, world: int) -> OptionError:
    """Make the error for an unknown number of samples per rank, with the alternatives."""
    pipeline = stream.pipeline()
    exact = ""
    if pipeline.keeps_count:
        what = f"{world} ranks cannot share the samples of {stream!r}, which are counted while they are read"
    else:
        what = (
            f"{', '.join(pipeline.changing)} changes the number of samples, so that {world} ranks would have different "
            "numbers of batches"
        )
    if pipeline.packing is not None:
        return OptionError(
            f"{what}: put .epoch(samples=N) behind it, or .repeat() before it, by which some documents may come again "
            "or be skipped; stats() counts them. With tail='uneven' each document comes once, and each rank ends with "
            f"its own rows. Or {_ALL}"
        )
    if pipeline.source.answers_keys and not pipeline.source.is_compressed:
        exact = "by filtering by keys of an index (.filter(f, field='__key__')), or "
    return OptionError(
        f"{what}. Each sample comes once {exact}by tail='uneven', with which each rank ends with its own data "
        "(for evaluation, and torch's Join). "
        "All ranks make as many steps by .epoch(samples=N) behind all filters, or by .repeat(): some samples may come "
        f"again or be skipped, which stats() counts. Or {_ALL}"
    )


def _check_iterable(source: SampleSource, world: int) -> None:
    from headrace.engine.iterable_sharing import name_of

    name = name_of(source.data)
    if source.ranks_by is None:
        raise OptionError(
            f"{name} does not say how {world} ranks divide its samples, and each would get the same ones: have its "
            "aiter() give the part that hr.shard_info() names, and say so by ranks_by='shard_info'; or say "
            "ranks_by='position', by which every rank reads all samples and keeps its part of each global batch; or "
            f"{_ALL}"
        )
    if source.ranks_by not in ("shard_info", "position"):
        raise check.invalid(f"{name}.ranks_by", source.ranks_by, "'shard_info', 'position' or None")


def met(stream: Stream, state: Mapping[str, object], world: int) -> Stream:
    """Return the stream, with an index if the state was saved with one, as several ranks do.

    Raises:
        StateMismatchError: the state was saved without an index, and this stream has one.
    """
    pipeline = stream.pipeline()
    source, has_count = pipeline.source, state.get("count") is not None
    indexed = stream.indexed("the state is of ranks that share") if has_count else stream
    if indexed is not stream:
        return indexed
    if not source.traits.indexed or has_count or not has_numbers(pipeline, world):
        return stream
    if state.get("data") == source.at_revision(source.fingerprint()):
        here = "here they are" if world == 1 else f"{world} ranks share them"
        raise StateMismatchError(
            f"the state is of shards that were read without an index, and {here} by one, in another order: end that "
            "epoch as it was begun, or have set_epoch() begin another one here. States of "
            'hr.stream(…, index="build") are good for any number of ranks',
            field="index",
        )
    return stream


def why_not_merged(stream: Stream, world: int, *, has_order: bool) -> str:
    """Explain why another rank cannot use the state of one rank, and the alternatives."""
    if has_order:
        return "merge the states of all ranks by hr.merge_states"
    whole = f"load each rank's own with {world} of them, or have set_epoch() begin another epoch"
    if stream.pipeline().source.traits.iterated:
        return f"samples of an iterable have no numbers, and a rank's state tells how far it is itself: {whole}"
    if stream.pipeline().source.is_compressed:
        return (
            f"compressed shards are read from their start, and ranks read shards of their own or parts of them: {whole}"
        )
    return (
        f'without an index ranks read shards of their own: {whole}; states of hr.stream(…, index="build") are good for '
        "any number of ranks"
    )
