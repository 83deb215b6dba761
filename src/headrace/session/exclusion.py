"""Exclusion of samples from epochs, by number and by step."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from headrace._util import check
from headrace.engine.scheduler.skip_rules import numbers_in
from headrace.errors import StateMismatchError
from headrace.options import Exclude
from headrace.order.cursor import Cursor, compressed, expanded, united
from headrace.order.orders import ENDLESS, Order
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import refusal
from headrace.state.state import State
from headrace.types import Ints, Tail

_AT_ONCE = 2**18  # positions searched at once


class ExclusionFilter:
    """Applies `headrace.Exclude` to epochs whose samples have numbers."""

    def __init__(self, exclude: Exclude, planning: Planning, tail: Tail) -> None:
        self._exclude, self.planning = exclude, planning
        pipeline = planning.pipeline
        if (counting := pipeline.counted_as_read) is not None:
            remedy = f"put .{counting} before the operators that repeat samples"
            raise refusal("positions", "exclude=", f".{counting}", remedy=remedy)
        if exclude.steps and not (pipeline.keeps_count or pipeline.packing):
            remedy = "name the samples: hr.Exclude(samples=…)"
            raise refusal("known number", "Exclude(steps=…)", f".{pipeline.changing[0]}", remedy=remedy)
        if exclude.steps and tail == "carry":
            raise check.conflict("Exclude(steps=…)", "hr.Ranks(last_batch='carry')", "name samples, which have numbers")
        self._found: tuple[int, Ints] | None = None  # of the last requested epoch

    def start_of(self, begin: State, step: int, order: Order | None) -> State:
        """Remove excluded samples from a start state, so that states of the epoch record it."""
        cursor = self.remaining(begin.cursor, begin.epoch, step, order)
        if cursor.position == begin.cursor.position and np.array_equal(cursor.holes, begin.cursor.holes):
            return begin
        if begin.received:
            raise StateMismatchError(
                "exclude= names samples that the ranks of this state have already divided among them: merge the states "
                "of all ranks by hr.merge_states, and load that",
                field="rank",
            )
        return replace(begin, cursor=cursor)

    def remaining(self, cursor: Cursor, epoch: int, step: int, order: Order | None = None) -> Cursor:
        order = order or self.planning.order(epoch)
        ranges = [(a * step, b * step) for a, b in self._exclude.steps] if epoch == self._exclude.epoch else []
        end = order.count
        ranges = [(a, min(b, end)) for a, b in ranges if a < end]
        carried = self._among(order, expanded(cursor.holes[cursor.holes[:, 0] < 0]))
        for some in (compressed(carried), self._ranges_of_samples(epoch, order)):
            ranges += map(tuple, some.tolist())
        return cursor.without_ranges(np.array(united(ranges), np.int64).reshape(-1, 2))

    def of_document(self, order: Order, position: int) -> bool:
        return bool(np.isin(self.planning.numbers(order, np.array([position])), self._samples)[0])

    @cached_property
    def _samples(self) -> Ints:
        source, named = self.planning.pipeline.source, numbers_in(self._exclude.files, self.planning.fingerprint)
        last = max(self._exclude.samples, default=-1)
        if source.keeps_numbers and last >= source.starts[-1]:
            needed = f"below {source.starts[-1]}, the number of samples of {source.name}"
            raise check.invalid("Exclude: one of samples", last, needed)
        return np.unique(np.concatenate([np.asarray([*self._exclude.samples], np.int64), named]))

    def _ranges_of_samples(self, epoch: int, order: Order) -> Ints:
        if not len(self._samples):
            return np.zeros((0, 2), np.int64)
        if self._found is None or self._found[0] != epoch:
            self._found = epoch, compressed(self._positions(order))
        return self._found[1]

    def _positions(self, order: Order) -> Ints:
        if order.count >= ENDLESS:
            raise refusal("end", "exclude= of samples", self.planning.pipeline.source.name)
        if not self.planning.pipeline.order.is_fixed:
            raise check.conflict("exclude=", ".sample(sampler)", "have the sampler exclude these samples")
        starts = range(0, order.count, _AT_ONCE)
        found = [self._among(order, np.arange(at, min(at + _AT_ONCE, order.count))) for at in starts]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _among(self, order: Order, positions: Ints) -> Ints:
        return positions[np.isin(self.planning.numbers(order, positions), self._samples)]
