"""Messages to workers, and the error of a task that ends workers."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from headrace._util.pickled import as_call
from headrace.errors import WorkerDiedError
from headrace.workers.failures import PackedError
from headrace.workers.tasks import Finish, Reply, Task
from headrace.workers.wire_chunks import Place, SentPart

DEATHS = 3  # worker deaths before a sample fails


class Runner(Protocol):
    """Handler of messages: `headrace.workers.task_runner.TaskRunner`."""

    def work(self, order: TaskMessage) -> Reply: ...

    def place(self, task: int, place: Place) -> Reply: ...

    def let_go(self, task: int) -> None: ...

    def detach(self, number: int) -> None: ...

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    def learn_packed(self, number: int, view: memoryview, lengths: Sequence[int], descriptors: list[int]) -> None: ...


@as_call
@dataclass(slots=True, eq=False)
class TaskMessage:
    """A task as sent to a worker, with places instead of leases. See `headrace.workers.tasks.Task`.

    `one_by_one`: process samples one at a time, to find the sample that ends workers.
    """

    task: int
    chain: int
    key: int
    batch: int
    finish: Finish
    parts: Sequence[SentPart]
    position: int
    positions: Sequence[int] | None
    slot: int
    capacity: int
    place: Place | None
    scan: tuple[Any, int, bool] | None
    failures: dict[int, PackedError]
    one_by_one: bool = False
    notes: Sequence[tuple[int, ...]] = ()
    first_number: int | None = None
    each: int = 0

    is_answered: ClassVar[Literal[True]] = True

    @classmethod
    def of(cls, number: int, task: Task, parts: Sequence[SentPart], place: Place | None) -> TaskMessage:
        return cls(
            number,
            task.chain,
            task.key,
            task.batch,
            task.finish,
            parts,
            task.position,
            task.positions,
            task.slot,
            task.capacity,
            place,
            task.scan,
            task.failures,
            bool(task.deaths),
            task.notes,
            task.first_number,
            task.each,
        )

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

    def carry_out(self, runner: Runner) -> Reply:
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

    def carry_out(self, runner: Runner) -> Reply:
        return runner.place(self.task, self.place)


@dataclass(frozen=True, slots=True)
class LetGo:
    """Discard a held result."""

    task: int

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: Runner) -> None:
        runner.let_go(self.task)


@dataclass(frozen=True, slots=True)
class ForgetSegment:
    number: int

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: Runner) -> None:
        runner.detach(self.number)


@dataclass(frozen=True, slots=True)
class SpecMessage:
    """The spec of a chain's samples, by which slots are written. Empty: determine it again."""

    chain: int
    spec: bytes

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: Runner) -> None:
        runner.learn_spec(self.chain, self.spec)


@dataclass(frozen=True, slots=True)
class ChainMessage:
    """A pickled chain for workers without shared memory. Replaces an older one."""

    number: int
    data: bytes
    lengths: tuple[int, ...]

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: Runner) -> None:
        runner.learn_packed(self.number, memoryview(bytearray(self.data)), self.lengths, [])


Asked = TaskMessage | PlaceMessage
"""Messages with a reply."""

Message = Asked | LetGo | ForgetSegment | SpecMessage | ChainMessage
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
