"""Whether samples can be divided among ranks, and states of some ranks be gone on with by others."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headrace.datasets.pipeline import Pipeline
from headrace.datasets.source import SampleSource
from headrace.datasets.stream import Stream
from headrace.engine.sharing import name_of
from headrace.errors import OptionError, StateMismatchError

log = logging.getLogger("headrace")

_ALL = "give the loader shard=False, and every rank all samples"


def has_numbers(pipeline: Pipeline, world: int) -> bool:
    """Whether samples have numbers, as far as so many ranks need them."""
    is_shared = world > 1 and pipeline.source.traits.indexed
    return (pipeline.is_by_number or pipeline.source.divides()) if is_shared else pipeline.has_numbers


def divided(stream: Stream, world: int) -> Stream:
    """The same stream, with an index where several ranks cannot share it without.

    Raises:
        OptionError: they cannot share it; it says what to do.
    """
    stream = _shared(stream, world)
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


def _shared(stream: Stream, world: int) -> Stream:
    pipeline = stream.pipeline()
    source = pipeline.source
    if source.traits.iterated:
        _check_iterable(stream, source, world)
        return stream
    if pipeline.passes[1] is None:
        if _lacks_index(source):
            log.warning(
                "%d ranks share shards without an index: one is made first, of the headers of their members: a "
                "request for every few of them. `headrace index` makes it once for all",
                world,
            )
            stream = _indexed(stream)
            pipeline = stream.pipeline()
        if not has_numbers(pipeline, world) and pipeline.given_count is None:
            raise OptionError(
                f"{world} ranks cannot share the samples of {stream!r}, which are counted while they are read: say how "
                "many an epoch has, by .epoch(samples=N) behind all filters, and each rank reads shards of its own; or "
                "make an index (headrace index URL…; compressed shards are shared by it where they are packed in "
                f"Zstandard's seekable frames and shuffled globally); or {_ALL}"
            )
    if pipeline.packing is not None and pipeline.is_endless:
        return stream  # a lane gives a sequence in each step
    if not pipeline.keeps_count and pipeline.given_count is None:
        raise OptionError(
            f"{', '.join(pipeline.changing)} changes the number of samples, so that {world} ranks would have different "
            "numbers of batches: put .epoch(samples=N) behind it, or filter by keys of an index "
            "(.filter(f, field='__key__')), or "
            f"{_ALL}"
        )
    return stream


def _indexed(stream: Stream) -> Stream:
    from headrace.datasets.sources.constructors import with_built_index  # and with them every format

    return with_built_index(stream)


def _lacks_index(source: SampleSource) -> bool:
    """Whether it has shards without an index, and could have one."""
    return source.traits.sharded and not source.traits.numbered and not source.is_compressed


def _check_iterable(stream: Stream, source: SampleSource, world: int) -> None:
    name = name_of(source.data)
    if source.ranks_by is None:
        raise OptionError(
            f"{name} does not say how {world} ranks divide its samples, and each would get the same ones: have its "
            "aiter() give the part that hr.shard_info() names, and say so by ranks_by='shard_info'; or say "
            "ranks_by='position', by which every rank reads all samples and keeps its part of each global batch; or "
            f"{_ALL}"
        )
    if source.ranks_by not in ("shard_info", "position"):
        raise OptionError(f"{name}.ranks_by={source.ranks_by!r}: 'shard_info', 'position' or None is meant")
    if stream.pipeline().given_count is None:
        raise OptionError(
            f"{world} ranks cannot share the samples of {stream!r}, which are counted while they come: say how many an "
            f"epoch has, by .epoch(samples=N) behind all filters, or {_ALL}"
        )


def met(stream: Stream, state: Mapping[str, object], world: int) -> Stream:
    """The same stream, with an index where the shards of a state were read by one, as several ranks do.

    Raises:
        StateMismatchError: those of the state were not, and here they are.
    """
    pipeline = stream.pipeline()
    source, has_count = pipeline.source, state.get("count") is not None
    if _lacks_index(source) and has_count:
        log.warning("the state is of ranks that share shards by an index: one is made first, to go on by")
        return _indexed(stream)
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
    """Why the state of one of so many ranks is of no use to another, and what is."""
    if has_order:
        return "merge the states of all ranks by hr.merge_states"
    whole = f"load each rank's own with {world} of them, or have set_epoch() begin another epoch"
    if stream.pipeline().source.traits.iterated:
        return f"samples of an iterable have no numbers, and a rank's state tells how far it is itself: {whole}"
    return (
        f'without an index ranks read shards of their own: {whole}; states of hr.stream(…, index="build") are good for '
        "any number of ranks"
    )
