"""Progress of the trainer through an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.delivery.slabs import Arrived
from headrace.errors import OptionError
from headrace.state.state import ResumePoint, ResumePoints

_REMEMBERED = 16  # number of batches before the last whose states stay available


class Progress:
    """The trainer's progress through one epoch.

    One consumer at a time changes it. Any thread may read it in between, and so may a signal handler that interrupts
    the consumer. There is no lock: each change is a single assignment that leaves a consistent value.

    States are computed on request. For samples received one by one, computing each state would dominate the work here.

    Args:
        save: Returns the state at a resume point.
    """

    def __init__(self, begin: ResumePoint, save: Callable[[ResumePoint], dict[str, object]]) -> None:
        self._save = save
        self._stretches: tuple[_Stretch, ...] = (_Stretch(begin),)
        self._failed: Arrived | None = None
        self.is_live = True

    @property
    def received(self) -> ResumePoint:
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
        if batch.after is last.points and batch.number == last.stop and batch.samples == last.samples:
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

    def _step(self, batches: int) -> ResumePoint:
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

    def _amend(self, late: ResumePoint | None) -> None:
        if late is not None:
            self._begin(_Stretch(_counted(late, self._stretches[-1].end)))

    def _begin(self, stretch: _Stretch) -> None:
        stretches, least = (*self._stretches, stretch), stretch.before.batches - _REMEMBERED
        first = 0
        while first + 1 < len(stretches) and stretches[first + 1].before.batches <= least:
            first += 1
        self._stretches = stretches[first:]


@dataclass(slots=True)
class _Stretch:
    """Consecutive batches [start, stop) of one message, each of `samples` samples."""

    before: ResumePoint
    points: ResumePoints = ()
    start: int = 0
    stop: int = 0
    samples: int = 0

    @property
    def end(self) -> ResumePoint:
        return self.after_first(self.stop - self.start)

    def after_first(self, count: int) -> ResumePoint:
        if not count:
            return self.before
        return _counted(self.points[self.start + count - 1], self.before, count, count * self.samples)


def _counted(point: ResumePoint, before: ResumePoint, batches: int = 0, samples: int = 0) -> ResumePoint:
    return replace(point, batches=before.batches + batches, samples=before.samples + samples)
