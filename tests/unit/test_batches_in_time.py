"""A batch is emitted when it is full or its first sample has waited for long enough, on a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.by_hand import LAST, ByHand, Setup

from headrace.engine.scheduler.epoch_spec import GroupStage
from headrace.ops.batch import EvenBatcher
from headrace.torch_compat.collate import of_single
from headrace.workers.tasks import Chain

SIZE, WAIT_S, TOGETHER = 3, 1.0, 2


class Timed(ByHand):
    """Samples 0, 1, 2, … in groups of three that wait for a second; workers answer at once.

    Attributes:
        put: how many samples the source has put.
        came: the batches that the trainer was given.
    """

    def __init__(self, samples: int = 100, **more: Any) -> None:
        self.put, self.came = 0, list[list[int]]()
        stage = GroupStage(TOGETHER, partial(EvenBatcher, SIZE, drop_last=False), "batch", max_wait_s=WAIT_S)
        chains = {LAST: Chain((), of_single(list)), TOGETHER: Chain((), list)}
        super().__init__(
            Setup(samples=range(samples), sizes=[1] * samples, chains=chains, stages=(stage,), batch_size=1, **more)
        )
        self.go_on()

    def go_on(self) -> None:
        self.settle(bool)
        while self.workers.starting or any(worker.to_do for worker in self.workers.live):
            self.start()
            for worker in self.workers.live:
                while worker.to_do:
                    self.settle(partial(worker.answer, 0))

    def give(self, count: int = 1) -> int:
        """Put some samples, if as many are wanted; how many that were."""
        given = 0
        while given < count and self.source.ready:
            self.settle(partial(self.source.put, 0))
            self.go_on()
            given += 1
        self.put += given
        return given

    def wait(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        self.go_on()

    def receive(self) -> list[int] | None:
        came = self.take()
        self.go_on()
        came = came or self.take()  # which was made because it was asked for
        if came is None:
            return None
        self.came.append(came[1])
        if self.taken:
            self.let_go(0)
        return self.came[-1]

    def finish(self) -> None:
        while not self.running.done():
            assert self.give() or self.receive() is not None or self.source.ready
        while self.receive() is not None:
            pass


@contextmanager
def timed(**more: Any) -> Iterator[Timed]:
    with Timed(**more) as driven:
        yield driven
        driven.finish()
        assert driven.came == [batch for batch in driven.came if 1 <= len(batch) <= SIZE]
        assert [n for batch in driven.came for n in batch] == list(range(driven.put))


def test_last_batch_is_emitted_at_once() -> None:
    with timed(samples=4, look_ahead=9) as driven:
        driven.give(4)
        assert driven.receive() == [0, 1, 2]
        assert driven.receive() == [3]
        assert driven.loop.timers == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_timer_stops_at_the_limit_of_batches(limit: int) -> None:
    with timed(samples=20, look_ahead=9, limits=(None, limit)) as driven:
        driven.give(SIZE * limit + 1)
        for _ in range(limit):
            assert driven.receive() is not None
        driven.wait(10)
        assert driven.receive() is None
        assert driven.running.done()
        assert driven.loop.timers == 0
        driven.put = SIZE * limit


ACTIONS = st.lists(st.sampled_from(["give", "give", "give", "take", 0.25, 0.5, 1.0]), max_size=40)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(actions=ACTIONS, depth=st.integers(0, 3), look_ahead=st.integers(1, 9))
def test_timed_batches_equal_a_plain_program(actions: list[Any], depth: int, look_ahead: int) -> None:
    with timed(depth=depth, look_ahead=look_ahead, samples=30) as driven:
        plain = _Plain(depth)
        for action in actions:
            if action == "give":
                if driven.give():
                    plain.give()
            elif action == "take":
                assert driven.receive() == plain.take()
            else:
                driven.wait(action)
                plain.wait(action)


@pytest.mark.slow
@settings(max_examples=50, derandomize=True, deadline=None)
@given(actions=ACTIONS, depth=st.integers(0, 3))
def test_no_sample_is_lost_when_batches_are_sent_together(actions: list[Any], depth: int) -> None:
    with timed(depth=depth, look_ahead=9, samples=30, together=4) as driven:
        for action in actions:
            driven.give() if action == "give" else driven.receive() if action == "take" else driven.wait(action)


class _Plain:
    """A model without an engine.

    Args:
        depth: how many batches may be made before they are asked for.
    """

    def __init__(self, depth: int) -> None:
        self._next, self._now, self._since = 0, 0.0, 0.0
        self._waiting, self._made = list[int](), list[list[int]]()
        self._depth, self._taken, self._asked = depth, 0, 0

    def give(self) -> None:
        self._since = self._since if self._waiting else self._now
        self._waiting.append(self._next)
        self._next += 1
        self._look()

    def wait(self, seconds: float) -> None:
        self._now += seconds
        self._look()

    def take(self) -> list[int] | None:
        self._asked = self._taken + 1
        self._look()
        if self._taken == len(self._made):
            return None
        self._taken += 1
        return self._made[self._taken - 1]

    def _look(self) -> None:
        is_due = self._now >= self._since + WAIT_S and len(self._made) < self._asked + self._depth
        if self._waiting and (len(self._waiting) == SIZE or is_due):
            self._made.append(self._waiting)
            self._waiting = []
