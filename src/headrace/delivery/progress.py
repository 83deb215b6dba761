"""Progress of the trainer through an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.delivery.channel import Afters, AfterThese, ProgressDelta
from headrace.delivery.slabs import Arrived
from headrace.errors import OptionError
from headrace.types import Ranges

if TYPE_CHECKING:
    from headrace.order.row_states import RowProgress

_REMEMBERED = 16  # number of batches before the last whose states stay available


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """Progress of this rank since the epoch began or was resumed.

    Attributes:
        batches, samples: Numbers received.
        used: Number of samples the batches were cut from, failed ones included.
        covers: Ranges of source samples consumed by these batches.
        mark: Resume point of a source whose samples have no numbers.
        skipped: Number of failed samples skipped: (in total, directly before the next sample).
        is_over: True if the end of the epoch was reached.
        parts, passed, given: See `ProgressDelta`.
        rows: Progress of packed rows. None: at the start.
        repeated: Number of the samples that belong to a second or later pass over the data, if counted.
    """

    batches: int = 0
    samples: int = 0
    used: int = 0
    covers: Ranges = ()
    mark: Any = None
    skipped: tuple[int, int] = (0, 0)
    is_over: bool = False
    parts: tuple[int, ...] = ()
    passed: tuple[Ranges, ...] = ()
    given: tuple[int, ...] = ()
    rows: RowProgress | None = None
    repeated: int = 0


class Progress:
    """The trainer's progress through one epoch.

    One consumer at a time changes it. Any thread may read it in between, and so may a signal handler that interrupts
    the consumer. There is no lock: each change is a single assignment that leaves a consistent value.

    States are computed on request. For samples received one by one, computing each state would dominate the work here.

    Args:
        save: Returns the state for a snapshot.
    """

    def __init__(self, begin: ProgressSnapshot, save: Callable[[ProgressSnapshot], dict[str, object]]) -> None:
        self._save = save
        self._stretches: tuple[_Stretch, ...] = (_Stretch(begin),)
        self._failed: Arrived | None = None
        self.is_live = True

    @property
    def received(self) -> ProgressSnapshot:
        return self._stretches[-1].end

    def state(self, batches: int | None = None, *, is_over: bool = False) -> dict[str, object]:
        """Return the current state, or the state after an earlier batch.

        Args:
            batches: Number of batches of the epoch. None: all received so far.
            is_over: True if the epoch ends here, even if no end was received.

        Raises:
            OptionError: the state after `batches` batches is not available any more, or not yet.
        """
        step = self._stretches[-1].end if batches is None else self._step(batches)
        return self._save(replace(step, is_over=True) if is_over else step)

    def receive(self, batch: Arrived) -> None:
        last = self._stretches[-1]
        if batch.after is last.after and batch.number == last.stop and batch.samples == last.samples:
            last.stop += 1  # no batch failed before it: a failure starts a stretch of 0 samples
        else:
            self._pass_failed()
            self._amend(batch.late)
            self._add(batch, batch.samples)

    def fail(self, batch: Arrived) -> None:
        """Record an error that replaces a batch. Its samples count as used at the next request."""
        self._pass_failed()
        self._amend(batch.late)
        self._failed = batch

    def ask(self) -> None:
        self._pass_failed()

    def end(self) -> None:
        self._pass_failed()
        self._begin(_Stretch(replace(self._stretches[-1].end, is_over=True)))

    def _step(self, batches: int) -> ProgressSnapshot:
        stretches = self._stretches
        last = stretches[-1].end.batches
        first = max(stretches[0].before.batches, last - _REMEMBERED)
        for stretch in reversed(stretches if first <= batches <= last else ()):
            before = stretch.before
            if before.batches <= batches and not before.is_over:
                return stretch.after_first(batches - before.batches)
        raise OptionError(f"state_dict(batches={batches}): states after {first} to {last} batches are known")

    def _pass_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            self._add(failed, 0)

    def _add(self, batch: Arrived, samples: int) -> None:
        if batch.after is not None:
            self._begin(_Stretch(self._stretches[-1].end, batch.after, batch.number, batch.number + 1, samples))

    def _amend(self, late: ProgressDelta | None) -> None:
        if late is not None:
            self._begin(_Stretch(_with_more(self._stretches[-1].end, late)))

    def _begin(self, stretch: _Stretch) -> None:
        stretches, least = (*self._stretches, stretch), stretch.before.batches - _REMEMBERED
        first = 0
        while first + 1 < len(stretches) and stretches[first + 1].before.batches <= least:
            first += 1
        self._stretches = stretches[first:]


@dataclass(slots=True)
class _Stretch:
    """Consecutive batches [start, stop) of one message, each of `samples` samples."""

    before: ProgressSnapshot
    after: Afters = field(default_factory=AfterThese)
    start: int = 0
    stop: int = 0
    samples: int = 0

    @property
    def end(self) -> ProgressSnapshot:
        return self.after_first(self.stop - self.start)

    def after_first(self, count: int) -> ProgressSnapshot:
        received = self.before
        for delta in self.after.said(self.start, self.start + count):
            received = _with_more(received, delta)
        batches, samples = received.batches + count, received.samples + count * self.samples
        return replace(received, batches=batches, samples=samples) if count else received


def _with_more(received: ProgressSnapshot, after: ProgressDelta) -> ProgressSnapshot:
    return replace(
        received,
        used=received.used + after.used,
        covers=_with(received.covers, after.covers),
        mark=after.mark,
        skipped=after.skipped,
        parts=after.parts,
        passed=after.passed,
        given=after.given,
        rows=after.rows,
        repeated=received.repeated + after.repeated,
    )


def _with(covers: Ranges, more: Ranges) -> Ranges:
    """Merge ranges. Usually `more` directly follows the last range."""
    if len(covers) <= 1 and len(more) == 1 and more[0][0] == (covers[0][1] if covers else 0):
        return ((covers[0][0] if covers else 0, more[0][1]),)
    result: list[tuple[int, int]] = []
    for start, stop in sorted((*covers, *more)):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        elif start < stop:
            result.append((start, stop))
    return tuple(result)
