"""Shares of ranks: of epochs whose samples are counted as they come, and of rows that documents are packed into."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

from headrace._util import check
from headrace.delivery.progress import ProgressSnapshot
from headrace.engine.epoch_plan import EpochPlan, as_array
from headrace.errors import OptionError, StateMismatchError
from headrace.observe.stats import LoaderMeters
from headrace.ops.operator import counted
from headrace.options import Settings
from headrace.order import Cursor, Steps, share
from headrace.pipeline.needs import refusal
from headrace.pipeline.pipeline import Pipeline
from headrace.session.rank_checks import has_counts, has_numbers
from headrace.state.state import ResplitBase, State
from headrace.torch_compat.ranks import Ranks
from headrace.types import Tail

log = logging.getLogger("headrace")


def counted_share(
    begin: State, ranks: Ranks, size: int, planned: int, pipeline: Pipeline, tail: Tail
) -> tuple[State, Steps | None]:
    """Return (start state, this rank's samples): all ranks get equally many batches.

    If the batch size has changed, the remaining samples are split again from the step that all ranks have reached.

    Args:
        size: Samples per global batch.
        planned: Samples per global batch in the plan of positions.
        tail: How the epoch ends.

    Raises:
        StateMismatchError: the batch size differs, and the received samples are not complete steps.
    """
    step = begin.step_now or size
    since, count = begin.since, pipeline.given_count
    is_exact = has_counts(pipeline, ranks.world)
    if is_exact:
        count = counted(pipeline.source.count(), pipeline.order.operators)
    is_by_position = ranks.world > 1 and pipeline.source.ranks_by == "position" and begin.mark is not None
    if step != size and (is_exact or is_by_position):
        raise StateMismatchError(
            f"the state is of global batches of {step} samples, by which ranks divide the epoch; here they "
            f"have {size}: load it with batches of that size",
            field="step",
        )
    if count is None or ranks.world == 1:
        return replace(begin, since=ResplitBase(step=0 if size == planned else size)), None
    ending: Tail = tail if tail in ("drop", "uneven") else "short"
    steps = Steps(Cursor.at(since.everywhere), count, step, ending, ranks.rank, ranks.world)
    batches = begin.batches - since.batches
    steps = replace(steps, done=as_array(_received(steps, batches, begin.samples - since.here)))
    if step != size:
        if begin.samples - since.here != steps.samples(batches):
            merge = (
                ", or merge the states of all ranks by hr.merge_states" if has_numbers(pipeline, ranks.world) else ""
            )
            raise StateMismatchError(
                f"the state is of batches of {step} samples on all ranks, the last of which came before others; "
                f"here they have {size}: load it with batches of that size{merge}",
                field="step",
            )
        at = steps.after(batches).position
        since = ResplitBase(at, begin.samples, size, begin.batches)
        steps = Steps(Cursor.at(at), count, size, ending, ranks.rank, ranks.world)
    return replace(begin, since=since._replace(step=0 if size == planned else size)), steps


def count_share(plan: EpochPlan, received: ProgressSnapshot, meters: LoaderMeters) -> None:
    """Count this rank's repeated and unread samples of a finished epoch. Warn of the first."""
    assert plan.share is not None
    meters.left_out += plan.share.left_out
    repeated, unread = plan.passed(received)
    if (repeated or unread) and not (meters.repeated or meters.unread):
        came = received.samples - plan.begin.samples
        log.warning(
            "epoch %d: of %d samples that rank %d of %d received, %d came again, and %d of its part of the data were "
            "not looked at: .epoch(samples=%d) has ranks make as many steps, whatever is left on the others. "
            "tail='uneven' gives each sample once; so does an index, where there is no filter",
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


def part_of(count: int, ranks: Ranks) -> int:
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
        raise OptionError(
            f"{call}: {shared.end} sequences are no whole steps of {shared.size}, and each of {shared.world} ranks has "
            f"rows of its own: have .epoch(samples={shared.end // shared.size * shared.size}), or tail='drop'"
        )


def own_rows(begin: State, size: int, ranks: Ranks) -> State:
    """Reduce a state of all ranks to this rank's rows, or raise StateMismatchError."""
    if begin.progress is None:
        return begin
    if len(begin.progress.cursors) != size:
        raise _other_rows(len(begin.progress.cursors), size)
    try:
        return replace(begin, progress=begin.progress.part(range(*share(size, ranks.rank, ranks.world))))
    except ValueError as error:
        raise StateMismatchError(f"lanes of the state are not those of these ranks: {error}", field="step") from error


def check_rows(begin: State, size: int, ranks: Ranks) -> None:
    """Raise StateMismatchError if a state of this rank has another number of rows."""
    if begin.progress is None:
        return
    low, high = share(size, ranks.rank, ranks.world)
    if begin.step_now != size or len(begin.progress.cursors) != high - low:
        raise _other_rows(begin.step_now, size)


def _other_rows(before: int, now: int) -> StateMismatchError:
    return StateMismatchError(
        f"the state is of documents that are packed in {before} lanes, one for each row of the global batch, and here "
        f"it has {now} rows: load it with batches of that size",
        field="step",
    )
