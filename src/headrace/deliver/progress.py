"""What a trainer has received of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.deliver.opening import Arrived
from headrace.delivery import Afters, AfterThese, ProgressDelta
from headrace.errors import OptionError
from headrace.lanes import LaneProgress
from headrace.types import Ranges

_REMEMBERED = 16  # batches before the last one whose states can be asked for


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """What has been received, since an epoch was begun or gone on with.

    Attributes:
        batches, samples: how many, on this rank.
        used: from how many samples, failed ones too, the batches were cut.
        covers: which of the source's samples are used up by that.
        mark: where the source can be begun again.
        skipped: how many failed samples were left out: (in all, right before what comes next).
        is_over: whether it was said that there is no more.
        parts, passed, given: what is known of what the first samples give that are not used up, and how much came
            before that; see `ProgressDelta`.
        lanes: how far lanes are, where documents are packed in these; None: at the begin.
        repeated: how many samples were of later passes over the data than the first, where that is counted.
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
    lanes: LaneProgress | None = None
    repeated: int = 0


class Progress:
    """The trainer's way through one epoch.

    It is changed by whoever takes the next batch, one at a time, and may be asked in the middle of that: by any thread,
    and by signal handlers, which interrupt the thread that changes it. So there is no lock, and each change is one
    assignment behind which all is as it was said.

    What a state says is made when it is asked for: of samples that come one by one, that would take longer than all
    else that is done to them here.

    Args:
        begin: how it stands at first.
        save: makes a state of it.
    """

    def __init__(self, begin: ProgressSnapshot, save: Callable[[ProgressSnapshot], dict[str, object]]) -> None:
        self._save = save
        self._stretches: tuple[_Stretch, ...] = (_Stretch(begin),)
        self._failed: Arrived | None = None
        self.is_live = True

    @property
    def received(self) -> ProgressSnapshot:
        """What has been received so far."""
        return self._stretches[-1].end

    def state(self, batches: int | None = None, *, is_over: bool = False) -> dict[str, object]:
        """The state after what was received so far, or after so many batches of the epoch.

        Args:
            batches: how many.
            is_over: the epoch ends with these, whether it was said or not.

        Raises:
            OptionError: that is too long ago, or still to come.
        """
        step = self._stretches[-1].end if batches is None else self._step(batches)
        return self._save(replace(step, is_over=True) if is_over else step)

    def receive(self, batch: Arrived) -> None:
        """A batch is given to the trainer."""
        last = self._stretches[-1]
        if batch.after is last.after and batch.number == last.stop and batch.samples == last.samples:
            last.stop += 1  # nothing failed before it: that would be a stretch without samples
        else:
            self._pass_failed()
            self._amend(batch.late)
            self._add(batch, batch.samples)

    def fail(self, batch: Arrived) -> None:
        """An error is raised in the place of a batch, which is used up once the next one is asked for."""
        self._pass_failed()
        self._amend(batch.late)
        self._failed = batch

    def ask(self) -> None:
        """The next batch is asked for."""
        self._pass_failed()

    def end(self) -> None:
        """The epoch is over, and the trainer was told so."""
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
    """Batches that were received one after the other, of which one message tells.

    Attributes:
        before: how it stood before them.
        after: what that message says.
        start, stop: which of the batches that it tells of they are.
        samples: of each.
    """

    before: ProgressSnapshot
    after: Afters = field(default_factory=AfterThese)
    start: int = 0
    stop: int = 0
    samples: int = 0

    @property
    def end(self) -> ProgressSnapshot:
        """How it stands after them."""
        return self.after_first(self.stop - self.start)

    def after_first(self, count: int) -> ProgressSnapshot:
        """How it stood after the first so many."""
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
        lanes=after.lanes,
        repeated=received.repeated + after.repeated,
    )


def _with(covers: Ranges, more: Ranges) -> Ranges:
    """Ranges and some more of them; mostly those follow the last one."""
    if len(covers) <= 1 and len(more) == 1 and more[0][0] == (covers[0][1] if covers else 0):
        return ((covers[0][0] if covers else 0, more[0][1]),)
    result: list[tuple[int, int]] = []
    for start, stop in sorted((*covers, *more)):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        elif start < stop:
            result.append((start, stop))
    return tuple(result)
