"""Checks and states of ranks that pack documents in lanes."""

from __future__ import annotations

from dataclasses import replace

from headrace.datasets.pipeline import Pipeline
from headrace.errors import OptionError, StateMismatchError
from headrace.options import Settings
from headrace.plan import Steps, share
from headrace.plan.lane_states import part_of
from headrace.state import State
from headrace.torch_compat.ranks import Ranks


def check_packing(pipeline: Pipeline, settings: Settings, shared: Steps | None, *, has_numbers: bool) -> None:
    """Raise OptionError if ranks cannot pack documents whose lengths are not known in advance."""
    if pipeline.packing is None:
        return
    call = f".pack({pipeline.packing.length}) of documents that are read first"
    if not has_numbers:
        raise OptionError(
            f"{call}: samples of {pipeline.source.name} have no numbers before they are read, and sequences would be "
            "others on other ranks; shards need an index for that (headrace index URL…), and compressed ones "
            "Zstandard's seekable frames"
        )
    if settings.exclude is not None and settings.exclude.steps:
        raise OptionError(
            f"{call}, and exclude= of steps: what a step has is known only once it is made; name documents, by their "
            "numbers"
        )
    if shared is not None and any(shared.last):
        raise OptionError(
            f"{call}: {shared.end} sequences are no whole steps of {shared.size}, and each of {shared.world} ranks has "
            f"rows of its own: have .epoch(samples={shared.end // shared.size * shared.size}), or tail='drop'"
        )


def own_lanes(begin: State, size: int, ranks: Ranks) -> State:
    """Reduce a state of all ranks to this rank's lanes, or raise StateMismatchError."""
    if begin.progress is None:
        return begin
    if len(begin.progress.cursors) != size:
        raise _other_lanes(len(begin.progress.cursors), size)
    try:
        return replace(begin, progress=part_of(begin.progress, range(*share(size, ranks.rank, ranks.world))))
    except ValueError as error:
        raise StateMismatchError(f"lanes of the state are not those of these ranks: {error}", field="step") from error


def check_lanes(begin: State, size: int, ranks: Ranks) -> None:
    """Raise StateMismatchError if a state of this rank has another number of lanes."""
    if begin.progress is None:
        return
    low, high = share(size, ranks.rank, ranks.world)
    if begin.step_now != size or len(begin.progress.cursors) != high - low:
        raise _other_lanes(begin.step_now, size)


def _other_lanes(before: int, now: int) -> StateMismatchError:
    return StateMismatchError(
        f"the state is of documents that are packed in {before} lanes, one for each row of the global batch, and here "
        f"it has {now} rows: load it with batches of that size",
        field="step",
    )
