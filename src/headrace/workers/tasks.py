"""Chains of steps, and the messages between engine and workers.

Positions count the samples of an epoch in the order of its plan, from 0.
"""

from __future__ import annotations

import operator
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headrace._util.functions import as_it_is
from headrace._util.pickled import as_call
from headrace._util.sample_ranges import Rows
from headrace._util.shared_memory import Lease
from headrace.errors import WorkerDiedError
from headrace.workers.failures import Origin, PackedError
from headrace.workers.sample_chunks import Part, Place

if TYPE_CHECKING:
    from headrace.workers.task_runner import TaskRunner


@dataclass(frozen=True, slots=True)
class Step:
    """One function of a chain, run for each sample (or, after collation, for each batch).

    Attributes:
        kind: "map" returns the next sample, "filter" True to keep it, "many" a list of samples.
        fn: A coroutine function runs on the event loop, any other function in a worker.
        random: True if the generators of Python, numpy and torch are seeded for each sample before it runs, beside
            `hr.rng()`. None: it draws nothing, and none is seeded.
        is_implied: True if the step follows from the source and was not written by the user.
        open_rows: For the first step: runs it on the rows [start, stop) of `headrace.formats.opening.BlockRows`
            together. Returns the results, with None for rows that must go through the step, and their bytes. Never
            raises.
        open_many: As `open_rows`, for `headrace.formats.opening.MemberRows`.
        is_numbered: True if workers pass `fn` a tuple: the sample's position in the epoch, and the sample. After other
            samples were made, the position counts those.
        passed: Operators before this one, from the source on, for errors.
        is_shardable: True if each rank may apply it to its samples alone.
        is_without_torch: True if it is known not to need torch.
        reads: True if it reads the sample by its key. Async functions may follow such a step anywhere.
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
        """True if the step makes exactly one sample from each."""
        return self.kind == "map"

    @property
    def told(self) -> str:
        return f"{self.name}; operators: {self.passed}" if self.passed else self.name


NO_STEP = Step("", "map", as_it_is)
"""Represents the stage before the first step."""


class Finish(Enum):
    """How a worker handles the samples that its chain made."""

    SLOTS = "slots"  # write each into its slot in the batch's slab
    BATCH = "batch"  # collate them and write the batch into the slab
    EACH = "each"  # collate and write several batches, possibly not all: see `Task.each`
    COLLATE = "collate"  # as BATCH, for samples that have passed the chain already
    SAMPLES = "samples"  # write them as a list for the next stage
    GROUP = "group"  # as SAMPLES, for the result of the chain on all of them together
    CHECK = "check"  # discard them and report failures only
    SCAN = "scan"  # find the samples in fetched bytes

    @property
    def is_inner(self) -> bool:
        """True if another stage follows, so that the result does not belong to a batch yet."""
        return self in (Finish.SAMPLES, Finish.GROUP)

    @property
    def is_of_made(self) -> bool:
        """True if other tasks have made the batch's samples already."""
        return self in (Finish.COLLATE, Finish.CHECK)


@dataclass(slots=True, eq=False)
class Work:
    """Fields of a task that the engine and the worker share.

    Attributes:
        key: Seed of the samples' random numbers, combined with the positions.
        batch: Batch that the task contributes to. Tasks of earlier batches go first.
        positions: Position of each sample, if they are not consecutive.
        first_number: Number of the first sample among those that the stages before have made in the epoch. None: it is
            the position.
        slot: Slot of the first sample in its batch.
        each: For SLOTS and EACH: samples per batch, if the task has several whole batches. Else 0.
        publishes: EACH: True to publish each batch in `place` as soon as it is made.
        scan: (the shard's scanner, offset of the buffer in the shard, True if it is the last buffer) for Finish.SCAN,
            whose buffer is at `place`.
        notes: For Finish.GROUP: details of each sample for the chain.
        failures: Errors of samples that ended too many workers, by index in the task.
    """

    chain: int
    key: int
    batch: int
    finish: Finish
    parts: Sequence[Part]
    position: int = 0
    positions: Sequence[int] | None = None
    first_number: int | None = None
    slot: int = 0
    capacity: int = 0
    each: int = 0
    publishes: bool = False
    scan: tuple[Any, int, bool] | None = None
    notes: Sequence[tuple[int, ...]] = ()
    failures: dict[int, PackedError] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Task(Work):
    """Work for one worker, with leases. Must not change before the reply, as another worker may repeat it.

    Attributes:
        place: Memory for the result, if already known.
        deaths: Number of workers that ended, by index of the sample.
        attempts: Number of times that it was sent to a worker.
    """

    place: Lease | None = None
    deaths: dict[int, int] = field(default_factory=dict)
    attempts: int = 0

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


@as_call
@dataclass(slots=True)
class Reply:
    """A worker's reply to a task.

    Attributes:
        kind: "written"; "held" (made, but without memory for the result, or with less than `size`); "mismatch" (the
            samples do not have the spec of the slots); "failed" (one exception for the whole task).
        size: "held": bytes needed. "written", except SLOTS: bytes written.
        spec: "held" with Finish.SLOTS: the spec of a sample, None if slots are impossible.
        lengths: "written" with BATCH and SAMPLES: bytes of the pickle and its buffers.
        kept: SAMPLES: for each in the list, its index in the task. One sample may become many, or none. GROUP: all 0.
        failed: SAMPLES and GROUP: indices of failures in the list, ascending.
        measures: SAMPLES and GROUP, if the chain has a measure: that of each in the list; 0 for failures.
        errors: (slot, error). SAMPLES also has a Failure in the list. SLOTS, if the chain skips: the other samples are
            written without gaps from the task's first slot on, so that its last slots stay empty.
        left_out: GROUP, if the chain skips and gets notes: (index in the task, error) of failed samples missing in the
            result.
        columns: Values that are not written into slots: a list per leaf.
        pieces: EACH: where each batch is, as in `PackedEach`. Empty if the batch has failed. SAMPLES that are pickled
            one by one: see `headrace.workers.sample_chunks.ApartPart`.
        is_table: True if SAMPLES are a table: see `headrace.workers.sample_chunks.TablePart`.
        batches: Number of finished batches, if the task has several. May be lower than in the task: the worker stopped
            after many bytes or a long time.
        copies: "written" without shared memory: (offset, bytes) for the task's place.
        busy_s: Seconds per step of the chain. Collation and writing come last.
        made_s: Seconds for the samples, earlier replies to this task included.
        took_s: Seconds until the result was ready to write, with collation.
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
    batches: int = 0
    pieces: Sequence[tuple[int, ...]] = ()
    is_table: bool = False
    copies: list[tuple[int, bytes]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    made_s: float = 0.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Chain:
    """Work done by workers: `steps` on each sample, then `collate` and `after` on the batch.

    Attributes:
        collate: Makes a batch from a list of samples. None: the only sample of the list is the batch.
        init: Called once in each worker process, with its number.
        columns: Does the work of `steps` for a whole row table at once. None: not possible. See
            `headrace.formats.decoders`.
        skips: True if batches are collated without failed samples. False: a batch with a failed sample is not collated.
        by_key: True if samples come as keys, which then seed their random numbers instead of positions.
        many: Does the work of `steps` for all keys of a task at once.
        measure: Returns a number for each sample, by which the next stage groups samples.
        begin: Called in each worker, process or thread, with its number, before its first task of this chain.
        pack_error: Packs an exception, with the worker's number. None: as the engine does.
        unchanged: Returns True if `collate` returns a single sample unchanged and draws nothing. None: not known.
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


CHAINS = 1000  # chain numbers reserved for each stream: several streams may share workers


class StreamChains(dict[int, Chain]):
    """The chains of one stream, by number. They travel together, so that their functions share their globals."""

    @property
    def stream(self) -> int:
        return next(iter(self)) // CHAINS


DEATHS = 3  # worker deaths before a sample fails


_work_of = operator.attrgetter(*Work.__slots__)


@as_call
@dataclass(slots=True, eq=False)
class TaskMessage(Work):
    """A task as sent to a worker, with places instead of leases.

    `one_by_one`: process samples one at a time, to find the sample that ends workers.
    """

    task: int = 0
    place: Place | None = None
    one_by_one: bool = False
    attempt: int = 0

    is_answered: ClassVar[Literal[True]] = True

    @classmethod
    def of(cls, number: int, task: Task, parts: Sequence[Part], place: Place | None) -> TaskMessage:
        message = cls(*_work_of(task))
        message.task, message.parts, message.place = number, parts, place
        message.one_by_one, message.attempt = bool(task.deaths), task.attempts
        return message

    @property
    def number(self) -> int:
        return self.task

    @property
    def first_position(self) -> int:
        return self.position_of(0)

    def position_of(self, index: int) -> int:
        positions = self.positions
        return self.position + index if positions is None or not len(positions) else int(positions[index])

    def each_position(self, index: int) -> int:
        """Return the position of a sample, if each sample has its own."""
        return self.position + index if self.positions is None else self.positions[index]

    def carry_out(self, runner: TaskRunner) -> Reply:
        return runner.work(self)


@as_call
@dataclass(frozen=True, slots=True)
class PlaceMessage:
    """Memory for a held result. The number identifies its reply, as earlier ones may come late."""

    number: int
    task: int
    place: Place
    slot: int

    is_answered: ClassVar[Literal[True]] = True

    def carry_out(self, runner: TaskRunner) -> Reply:
        return runner.place(self.task, self.place)


@dataclass(frozen=True, slots=True)
class LetGo:
    """Discard a held result."""

    task: int

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: TaskRunner) -> None:
        runner.let_go(self.task)


@dataclass(frozen=True, slots=True)
class ForgetSegment:
    number: int

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: TaskRunner) -> None:
        runner.detach(self.number)


@dataclass(frozen=True, slots=True)
class SpecMessage:
    """The spec of a chain's samples, by which slots are written. Empty: determine it again."""

    chain: int
    spec: bytes

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: TaskRunner) -> None:
        runner.learn_spec(self.chain, self.spec)


@dataclass(frozen=True, slots=True)
class ChainsMessage:
    """Pickled chains of a stream, for workers without shared memory. They replace older ones."""

    stream: int
    data: bytes
    lengths: tuple[int, ...]

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: TaskRunner) -> None:
        runner.learn_packed(self.stream, memoryview(bytearray(self.data)), self.lengths, [])


Asked = TaskMessage | PlaceMessage
"""Messages with a reply."""

Message = Asked | LetGo | ForgetSegment | SpecMessage | ChainsMessage
"""Messages to a worker."""


def exit_text(code: int | None) -> str:
    if code is None:
        return "its exit status is not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def died(task: Task, sample: int, pid: int, code: int | None) -> WorkerDiedError:
    """Return the error of a sample that has ended the maximum number of workers."""
    from headrace._util.context import divided

    key, url = _origin(task, sample)
    batch = task.batch + max(sample, 0) // task.each if task.each else task.batch
    if task.scan is not None:
        url, which = task.scan[0].url, "the search for the samples"
    elif sample >= 0:
        position = task.position + sample if task.positions is None else task.positions[sample]
        which = f"sample {divided(position)[0]} of the epoch" + (f", key {key!r}" if key is not None else "")
    else:
        which = f"batch {batch} of the epoch, before or after its samples' own steps"
        which += f" (its first key: {key!r})" if key is not None else ""
    where = f" of {url}" if url else ""
    return WorkerDiedError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly ({exit_text(code)}); {DEATHS} did so, "
        f"all on {which}{where}",
        pid=pid,
        exitcode=code,
        key=key,
        url=url,
        batch=batch,
    )


def _origin(task: Task, sample: int) -> tuple[object, str | None]:
    index = max(sample, 0)
    for part in task.parts:
        if index < part.count:
            return part.origin(index)
        index -= part.count
    return None, None
