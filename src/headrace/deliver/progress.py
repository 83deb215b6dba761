"""What a trainer has received of an epoch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headrace.deliver.opening import Arrived
from headrace.delivery import ProgressDelta
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


class Progress:
    """The trainer's way through one epoch; asked from any thread.

    Args:
        begin: how it stands at first.
        save: makes a state of it.
    """

    def __init__(self, begin: ProgressSnapshot, save: Callable[[ProgressSnapshot], dict[str, object]]) -> None:
        self._save = save
        self._lock = threading.Lock()
        self._steps = deque([begin], maxlen=_REMEMBERED + 1)
        self._failed: tuple[ProgressDelta | None, int] | None = None
        self.is_live = True

    @property
    def received(self) -> ProgressSnapshot:
        """What has been received so far."""
        with self._lock:
            return self._steps[-1]

    def state(self, batches: int | None = None, *, is_over: bool = False) -> dict[str, object]:
        """The state after what was received so far, or after so many batches of the epoch.

        Args:
            batches: how many.
            is_over: the epoch ends with these, whether it was said or not.

        Raises:
            OptionError: that is too long ago, or still to come.
        """
        with self._lock:
            steps = [step for step in self._steps if batches is None or (step.batches == batches and not step.is_over)]
            if not steps:
                first, last = self._steps[0].batches, self._steps[-1].batches
                raise OptionError(f"state_dict(batches={batches}): states after {first} to {last} batches are known")
            step = steps[-1]
        return self._save(replace(step, is_over=True) if is_over else step)

    def receive(self, batch: Arrived) -> None:
        """A batch is given to the trainer."""
        with self._lock:
            self._pass_failed()
            self._amend(batch.late)
            self._add(batch.after, batch.samples)

    def fail(self, batch: Arrived) -> None:
        """An error is raised in the place of a batch, which is used up once the next one is asked for."""
        with self._lock:
            self._pass_failed()
            self._amend(batch.late)
            self._failed = batch.after, 0

    def ask(self) -> None:
        """The next batch is asked for."""
        if self._failed is not None:
            with self._lock:
                self._pass_failed()

    def end(self) -> None:
        """The epoch is over, and the trainer was told so."""
        with self._lock:
            self._pass_failed()
            self._steps.append(replace(self._steps[-1], is_over=True))

    def _pass_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            self._add(*failed)

    def _add(self, after: ProgressDelta | None, samples: int) -> None:
        if after is not None:
            last = self._steps[-1]
            self._steps.append(
                _with_more(replace(last, batches=last.batches + 1, samples=last.samples + samples), after)
            )

    def _amend(self, late: ProgressDelta | None) -> None:
        if late is not None:
            self._steps[-1] = _with_more(self._steps[-1], late)


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
