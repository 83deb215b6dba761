"""Division of samples among ranks: checks, shares of counted epochs, and rows of packed documents."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

from headrace._util import check
from headrace.dataset.source import SampleSource
from headrace.dataset.stream import Stream
from headrace.engine.epoch_plan import EpochPlan, as_array
from headrace.errors import OptionError, StateMismatchError
from headrace.observe import LoaderMeters
from headrace.ops.operator import counted
from headrace.options import Settings
from headrace.order.cursor import Cursor
from headrace.order.steps import Steps, share
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.state.state import Fingerprint, ResplitBase, ResumePoint, State
from headrace.torch_compat.ranks import RankShare
from headrace.types import Tail

log = logging.getLogger("headrace")

_ALL = "give the loader ranks=hr.Ranks.none, and every rank all samples"


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
    """Return the stream, with an index if several ranks need one to share it."""
    stream = _shared(_counted(stream, world, tail), world, tail)
    pipeline = stream.pipeline()
    if pipeline.unshardable is not None:
        needed = f"all samples, and each of {world} ranks would give it some: {_ALL}"
        raise check.lacking(f".{pipeline.unshardable} has is_shardable=False, and it", needed)
    if pipeline.numbered is not None and not has_numbers(pipeline, world):
        needed = f"numbers of samples on all {world} ranks: make an index (headrace index URL…), or {_ALL}"
        raise check.lacking(f".{pipeline.numbered.name} of {stream!r}", needed)
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
        raise check.conflict(
            "hr.Ranks(last_batch='uneven')", ".epoch() or .take(), which count the samples of all ranks,", remedy
        )


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
            f"{what}: put .epoch(samples=N) after it, or .repeat() before it, by which some documents may repeat or "
            "be skipped; stats() counts them. With hr.Ranks(last_batch='uneven') each document comes once, and each "
            f"rank ends with its own rows. Or {_ALL}"
        )
    if pipeline.source.answers_keys and not pipeline.source.is_compressed:
        exact = "by filtering by keys of an index (.filter(f, field='__key__')), or "
    return OptionError(
        f"{what}. Each sample comes once {exact}by hr.Ranks(last_batch='uneven'), with which each rank ends with its "
        "own data (for evaluation, and torch's Join). "
        "All ranks make as many steps by .epoch(samples=N) after all filters, or by .repeat(): some samples may repeat "
        f"or be skipped, which stats() counts. Or {_ALL}"
    )


def _check_iterable(source: SampleSource, world: int) -> None:
    from headrace.engine.open_readers import name_of

    name = name_of(source.data)
    if source.ranks_by is None:
        raise check.lacking(
            f"{name} on {world} ranks",
            "a ranks_by: 'shard_info', if its aiter() gives the part that hr.shard_info() names, or 'position', by "
            f"which every rank reads all samples and keeps its part of each global batch; or {_ALL}",
        )
    if source.ranks_by not in ("shard_info", "position"):
        raise check.invalid(f"{name}.ranks_by", source.ranks_by, "'shard_info', 'position' or None")


def reindexed(stream: Stream, saved: Fingerprint, world: int) -> Stream:
    """Return the stream, with an index if the state was saved with one, as several ranks do."""
    pipeline = stream.pipeline()
    source, has_count = pipeline.source, saved.count is not None
    indexed = stream.indexed("the state is of ranks that share") if has_count else stream
    if indexed is not stream:
        return indexed
    if not source.traits.indexed or has_count or not has_numbers(pipeline, world):
        return stream
    if saved.data == source.at_revision(source.fingerprint()):
        here = "here they are" if world == 1 else f"{world} ranks share them"
        raise StateMismatchError(
            f"the state is of shards that were read without an index, and {here} by one, in another order: end that "
            "epoch as it started, or start another one here by set_epoch(). States of "
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
        return f"samples of an iterable have no numbers, and a rank's state describes its own progress only: {whole}"
    if stream.pipeline().source.is_compressed:
        return (
            f"compressed shards are read from their start, and ranks read shards of their own or parts of them: {whole}"
        )
    return (
        f'without an index ranks read shards of their own: {whole}; states of hr.stream(…, index="build") are good for '
        "any number of ranks"
    )


def counted_share(
    begin: State, ranks: RankShare, size: int, planned: int, pipeline: Pipeline, tail: Tail
) -> tuple[State, Steps | None]:
    """Return (start state, this rank's samples): all ranks get equally many batches.

    If the batch size has changed, the remaining samples are split again from the step that all ranks have reached.

    Args:
        size: Samples per global batch.
        planned: Samples per global batch in the plan of positions.
        tail: How the epoch ends.
    """
    step = begin.step_now or size
    resplit, count = begin.resplit, pipeline.given_count
    is_exact = has_counts(pipeline, ranks.world)
    if is_exact:
        count = counted(pipeline.source.count(), pipeline.order.operators)
    is_by_position = ranks.world > 1 and pipeline.source.ranks_by == "position" and begin.mark is not None
    if step != size and (is_exact or is_by_position):
        raise StateMismatchError(
            f"the state is of global batches of {step} samples, by which ranks divide the epoch; here they "
            f"have {size}: load it with batches of that size",
            field="global_batch_size",
        )
    if count is None or ranks.world == 1:
        return replace(begin, resplit=ResplitBase(global_batch_size=0 if size == planned else size)), None
    ending: Tail = tail if tail in ("drop", "uneven") else "short"
    steps = Steps(Cursor.at(resplit.samples), count, step, ending, ranks.rank, ranks.world)
    batches, samples = begin.batches - resplit.batches, begin.samples - resplit.rank_samples
    steps = replace(steps, done=as_array(_received(steps, batches, samples)))
    if step != size:
        if samples != steps.samples(batches):
            merge = (
                ", or merge the states of all ranks by hr.merge_states" if has_numbers(pipeline, ranks.world) else ""
            )
            raise StateMismatchError(
                f"the state is of batches of {step} samples on all ranks, and the last ones came before "
                f"others; here they have {size}: load it with batches of that size{merge}",
                field="global_batch_size",
            )
        at = steps.after(batches).position
        resplit = ResplitBase(at, begin.samples, size, begin.batches)
        steps = Steps(Cursor.at(at), count, size, ending, ranks.rank, ranks.world)
    return replace(begin, resplit=resplit._replace(global_batch_size=0 if size == planned else size)), steps


def count_share(plan: EpochPlan, received: ResumePoint, meters: LoaderMeters) -> None:
    """Count this rank's repeated and unread samples of a finished epoch. Warn of the first."""
    assert plan.share is not None
    meters.left_out += plan.share.left_out
    repeated, unread = plan.passed(received)
    if (repeated or unread) and not (meters.repeated or meters.unread):
        came = received.samples - plan.begin.samples
        log.warning(
            "epoch %d: of %d samples that rank %d of %d received, %d were repeated, and %d of its part of the data "
            "were not read: .epoch(samples=%d) has ranks make as many steps, whatever is left on the others. "
            "hr.Ranks(last_batch='uneven') gives each sample once; so does an index, where there is no filter",
            plan.number,
            came,
            plan.rank,
            plan.world,
            repeated,
            unread,
            plan.share.end,
        )
    meters.repeated += repeated
    meters.unread += unread


def part_of(count: int, ranks: RankShare) -> int:
    """Return this rank's number of samples in a step of `count` samples."""
    low, high = share(count, ranks.rank, ranks.world)
    return high - low


def _received(steps: Steps, batches: int, samples: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of samples in a rank's batches. Short last batches may have come early."""
    sizes = [steps.samples(k + 1) - steps.samples(k) for k in range(steps.full, steps.steps)]
    for early in itertools.product((False, True), repeat=len(sizes)):
        others = (batches - sum(early)) * steps.batch
        if others + sum(itertools.compress(sizes, early)) == samples and others <= steps.full * steps.batch:
            yield 0, others
            for k, is_received in enumerate(early, steps.full):
                if is_received:
                    yield steps.samples(k), steps.samples(k + 1)
            return
    yield 0, samples


def check_packing(pipeline: Pipeline, settings: Settings, shared: Steps | None, *, has_numbers: bool) -> None:
    """Raise OptionError if ranks cannot pack documents whose lengths are not known in advance."""
    if pipeline.packing is None:
        return
    call = f".pack({pipeline.packing.length}) of documents that are read first"
    if not has_numbers:
        remedy = "make an index: headrace index URL…; compressed shards need Zstandard's seekable frames, too"
        raise refusal("numbers", call, pipeline.source.name, remedy=remedy)
    if settings.exclude is not None and settings.exclude.steps:
        raise check.conflict(call, "exclude= of steps", "exclude documents by their numbers")
    if shared is not None and any(shared.last):
        whole = shared.end // shared.size * shared.size
        needed = f"a multiple of {shared.size} sequences, not {shared.end}, as each rank has rows of its own"
        raise check.lacking(call, f"{needed}: have .epoch(samples={whole}), or hr.Ranks(last_batch='drop')")


def own_rows(begin: State, size: int, ranks: RankShare) -> State:
    """Reduce a state of all ranks to this rank's rows, or raise StateMismatchError."""
    if begin.rows is None:
        return begin
    if len(begin.rows.cursors) != size:
        raise _other_rows(len(begin.rows.cursors), size)
    try:
        return replace(begin, rows=begin.rows.part(range(*share(size, ranks.rank, ranks.world))))
    except ValueError as error:
        raise StateMismatchError(
            f"rows of the state are not those of these ranks: {error}", field="global_batch_size"
        ) from error


def check_rows(begin: State, size: int, ranks: RankShare) -> None:
    """Raise StateMismatchError if a state of this rank has another number of rows."""
    if begin.rows is None:
        return
    low, high = share(size, ranks.rank, ranks.world)
    if begin.step_now != size or len(begin.rows.cursors) != high - low:
        raise _other_rows(begin.step_now, size)


def _other_rows(before: int, now: int) -> StateMismatchError:
    return StateMismatchError(
        f"the state is of documents that are packed in {before} rows, one for each sample of the global batch, and "
        f"here it has {now}: load it with batches of that size",
        field="global_batch_size",
    )
