"""What workers are given, and what they answer: the steps done to samples, the tasks, and the replies.

Positions count the samples of an epoch in the order of its plan, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from headrace.failures import Origin, PackedError
from headrace.functions import as_it_is
from headrace.memory import Lease
from headrace.parts import Part
from headrace.pickled import as_call
from headrace.rows import Rows


@dataclass(frozen=True, slots=True)
class Step:
    """One function of a chain, run for each sample (or, after collation, for each batch).

    Attributes:
        name: what errors and reports call it, such as "map(augment)".
        kind: "map" gives the next sample, "filter" says whether to keep it, "many" gives a list of samples.
        fn: the function; a coroutine function runs on the event loop, any other in a worker.
        random: whether Python's, numpy's and torch's random number generators are set for each sample before it runs,
            beside `hr.rng()`; None: it draws nothing, and none is set.
        is_implied: whether it follows from the source, and nobody wrote it.
        open_rows: of the first step, what does it to the rows [start, stop) of `headrace.formats.opening.BlockRows`
            together. It gives what became of each, None in the places of those that must go through the step, and the
            bytes that they were; and raises nothing.
        open_many: the same of `headrace.formats.opening.MemberRows`.
        is_numbered: whether workers give `fn` a tuple: the sample's position in the epoch, and the sample.
        passed: the operators that a sample has passed, from its source to this one, for errors.
        is_shardable: whether ranks may each do it to samples of their own.
        is_separate: whether it runs in worker processes alone.
        is_without_torch: whether it is known to need no torch.
        reads: whether it reads the sample, by its key: async functions may follow it anywhere.
    """

    name: str
    kind: Literal["map", "filter", "many"]
    fn: Callable[[Any], Any]
    random: bool | None = None
    is_implied: bool = False
    open_rows: Callable[[Any, int, int], tuple[Sequence[object], int]] | None = None
    open_many: Callable[[Any, int, int], tuple[Sequence[object], int]] | None = None
    is_numbered: bool = False
    passed: str = ""
    is_shardable: bool = True
    is_separate: bool = False
    is_without_torch: bool = False
    reads: bool = False

    @property
    def keeps_count(self) -> bool:
        """Whether one sample comes out for each that goes in."""
        return self.kind == "map"

    @property
    def told(self) -> str:
        """What the note of an error says of it."""
        return f"{self.name}; operators: {self.passed}" if self.passed else self.name


NO_STEP = Step("", "map", as_it_is)
"""Stands for what is before the first step."""


class Finish(Enum):
    """What a worker does with the samples that its chain made."""

    SLOTS = "slots"  # write each into its place in the batch's slab
    BATCH = "batch"  # collate them and write the batch into the slab
    EACH = "each"  # the same of each by itself, as far as the task is carried out: see `Reply.sizes`
    COLLATE = "collate"  # the same, of samples that went through the chain already
    SAMPLES = "samples"  # write them, as a list, where the next stage finds them
    GROUP = "group"  # the same, of what the chain makes of all of them together
    CHECK = "check"  # leave them; only what failed is of interest
    SCAN = "scan"  # not samples yet: find where they lie in fetched bytes

    @property
    def is_inner(self) -> bool:
        """Whether another stage follows: what is made is no batch's own yet."""
        return self in (Finish.SAMPLES, Finish.GROUP)

    @property
    def is_of_made(self) -> bool:
        """Whether it is all that is left to do for a batch whose samples have been made by other tasks."""
        return self in (Finish.COLLATE, Finish.CHECK)


@dataclass(slots=True, eq=False)
class Task:
    """Work for one worker. It may be given to another until its reply has come: what it names stays as it is.

    Attributes:
        chain: the number of the chain of steps, as the workers were told it.
        key: from which, with the positions, the samples' random numbers are made.
        batch: the batch it helps to make; tasks of earlier batches go first.
        finish: what to do with the samples.
        parts: the samples.
        position: the position of the first one.
        positions: the position of each, where they do not follow one another.
        slot: the place of the first one in its batch.
        capacity: how many slots the slab has.
        place: where to write, if that is known already.
        scan: (the shard's scanner, the buffer's offset in the shard, whether it is the last) for Finish.SCAN, whose
            buffer is at `place`.
        notes: for Finish.GROUP, what the chain is told of each sample besides.
        failures: for samples that have ended too many workers, by their index in the task, the error in their place.
        deaths: how many workers have ended at which sample of it.
    """

    chain: int
    key: int
    batch: int
    finish: Finish
    parts: list[Part]
    position: int = 0
    positions: Sequence[int] | None = None
    slot: int = 0
    capacity: int = 0
    place: Lease | None = None
    scan: tuple[Any, int, bool] | None = None
    notes: Sequence[tuple[int, ...]] = ()
    failures: dict[int, PackedError] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


@as_call
@dataclass(slots=True)
class Reply:
    """What a worker answers to a task.

    Attributes:
        kind: "written"; "held" (made, but there is no place for it, or none of the size `size`); "mismatch" (the
            samples do not have the form that the slots were made for); "failed" (one exception for the whole task).
        size: bytes needed, of "held"; bytes that were written, of "written" for all but SLOTS.
        spec: the form of a sample, of "held" for Finish.SLOTS; None where slots cannot be made for it.
        lengths: of the pickle and its buffers, of "written" for BATCH and SAMPLES.
        kept: for SAMPLES of which of the task's samples those in the list are; of one there may be many, or none. For
            GROUP they are all of the first.
        failed: for SAMPLES and GROUP where in the list failures stand, ascending.
        measures: for SAMPLES and GROUP, where the chain has a measure, that of each in the list; 0 of failures.
        errors: (slot, error); for SAMPLES a Failure stands in the list too. For SLOTS, where the chain
            skips, the other samples are written one after the other from the task's first slot on: its last ones stay
            empty.
        left_out: for GROUP, where the chain skips and is told of its samples: (index in the task, error) of those that
            had failed, and that what was made is without.
        columns: values that are not written into slots: for each such leaf a list.
        value: what Finish.SCAN found.
        pieces: of SAMPLES that are packed each by itself: see `headrace.parts.ApartPart`.
        is_table: whether SAMPLES are in a table: see `headrace.parts.TablePart`.
        sizes: for EACH of each sample the bytes of its pickle and of its buffers, none where it has failed. There may
            be fewer than the task has samples: those behind them are left, for these were many bytes, or took long.
        copies: of "written", (offset, bytes) of the task's place, where no memory is shared.
        busy_s: for each step of the chain (collation and writing last) seconds spent in it.
        made_s: seconds spent on the samples themselves, with those of the replies before it to the same task.
        took_s: seconds until there was something to write, with collation.
    """

    kind: Literal["written", "held", "mismatch", "failed"]
    size: int = 0
    spec: bytes | None = None
    lengths: tuple[int, ...] = ()
    kept: Sequence[int] = ()
    failed: Sequence[int] = ()
    measures: Sequence[int] = ()
    errors: list[tuple[int, PackedError]] = field(default_factory=list)
    left_out: Sequence[tuple[int, PackedError]] = ()
    columns: list[list[object]] = field(default_factory=list)
    value: Any = None
    sizes: Sequence[tuple[int, ...]] = ()
    pieces: Sequence[tuple[int, ...]] = ()
    is_table: bool = False
    copies: list[tuple[int, bytes]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    made_s: float = 0.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Chain:
    """What is done to samples in workers: `steps` to each sample, then `collate` and `after` to the batch.

    Attributes:
        collate: makes a batch of a list of samples; None where the list's only sample is the batch.
        init: called once in each worker process, with its number.
        columns: does what `steps` do, for all samples of a row table at once; None where it cannot: see
            `headrace.formats.columns`.
        skips: whether a batch is collated without its samples that have failed; False: one that has any is not.
        by_key: whether samples come as keys, and their random numbers go by those and not by positions.
        many: does what `steps` do, for all keys of a task at once.
        measure: asked for a number of each sample that goes on to the next stage, which puts samples together by that.
        begin: called in each worker, process or thread, with its number, before the first task of this chain.
        pack_error: packs an exception, with the worker's number; None: as the engine packs its own.
        unchanged: says of a sample that is given on by itself that `collate` would give it back as it is, and draw no
            random numbers; None: of none is that known.
    """

    steps: tuple[Step, ...] = ()
    collate: Callable[[list[Any]], object] | None = None
    after: tuple[Step, ...] = ()
    init: Callable[[int], object] | None = None
    columns: Callable[[Rows, Any, Sequence[str]], Any] | None = None
    skips: bool = False
    by_key: bool = False
    many: Callable[[list[Any]], Sequence[object]] | None = None
    measure: Step | None = None
    begin: Callable[[int], object] | None = None
    pack_error: Callable[[BaseException, Origin, int], PackedError] | None = None
    unchanged: Callable[[object], bool] | None = None
