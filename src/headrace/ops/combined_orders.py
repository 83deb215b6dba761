"""The orders of several inputs, combined into those of one data set."""

from __future__ import annotations

import hashlib
from functools import cached_property, partial

import numpy as np

from headrace.dataset.source import SampleSource, SourceOrders
from headrace.errors import OptionError
from headrace.ops.combined import JoinedSpec
from headrace.order import Order, Passes, Places
from headrace.pipeline.epoch_orders import Planning
from headrace.types import Ints

_WINDOW_SAMPLES = 16384  # window of each input
_WINDOW_BYTES = 128 * 2**20
_PASSES = 2**32  # more than an input repeats in one pass over all


class JoinedOrders(SourceOrders):
    """The combined orders of several inputs."""

    def __init__(self, source: SampleSource, spec: JoinedSpec, seed: int) -> None:
        super().__init__(source, ())
        seeds = [spec.seed_of(seed, number) for number in range(len(spec.names))]
        self._spec, self._plannings, self._seed = spec, list(map(Planning, spec.pipelines, seeds)), seed
        counts = [len(one.starts) - 1 for one in spec.sources]
        self._first_shards = np.cumsum([0, *counts])[:-1].tolist()

    @property
    def count(self) -> int:
        return self._spec.count

    @cached_property
    def sizes(self) -> Ints:
        return np.concatenate([planning.sizes for planning in self._plannings])

    def order(self, epoch: int, number: int) -> Order:
        inputs = [self._input(planning, epoch, number * _PASSES) for planning in self._plannings]
        for label, (_, has), count in zip(self._spec.labels, inputs, self._spec.sizes, strict=True):
            if has != count:
                raise OptionError(f"{label} has {has} samples in epoch {epoch}, and not {count}")
        key = self._seed, epoch, number
        return self._spec.arrange([order for order, _ in inputs], key, self._first_shards, self._window)

    def _input(self, planning: Planning, epoch: int, first: int) -> tuple[Order, int]:
        """Return the order of an input, and its samples until it repeats or ends."""
        if not self._spec.begins_again:
            order = planning.passes(epoch, first)
            return _Located(planning, order), order.count
        passes = Passes(partial(self._pass, planning, epoch, first), None)
        return passes, passes.pass_count

    @staticmethod
    def _pass(planning: Planning, epoch: int, first: int, turn: int) -> Order:
        return _Located(planning, planning.one_pass(epoch, first + turn))

    @property
    def full_count(self) -> int | None:
        return self._spec.full_count

    def described(self) -> list[str]:
        described = [self._spec.described()]
        for name, planning in zip(self._spec.names, self._plannings, strict=True):
            described += [f"{name}: {line}" for line in planning.described()]
        return described

    @property
    def fingerprint(self) -> str:
        described = [
            f"{name}={planning.fingerprint}" for name, planning in zip(self._spec.names, self._plannings, strict=True)
        ]
        return hashlib.blake2b("\n".join(described).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    @property
    def window_bytes(self) -> int:
        """Approximate size of a window of samples that is read before any of them is used.

        For inputs that alternate, it is the sum of one window of each. So an input's share of a window is about one of
        its own windows, whose samples are stored close together.
        """
        if self._source.sample_bytes is None:
            return 0
        sequential = (min(_WINDOW_SAMPLES * nbytes, _WINDOW_BYTES) for nbytes in self._bytes_of_samples)
        windows = (planning.window_bytes for planning in self._plannings)
        each = [window or some for window, some in zip(windows, sequential, strict=True)]
        return int(max(each) if self._spec.is_in_turn else sum(each))

    @property
    def _window(self) -> int:
        if self._source.sample_bytes is None:
            return _WINDOW_SAMPLES
        each, counts = self._bytes_of_samples, self._spec.shares
        mean = max(each)
        if counts is not None and any(counts):
            mean = sum(some * nbytes for some, nbytes in zip(counts, each, strict=True)) / sum(counts)
        return max(1, int(self.window_bytes / max(1.0, mean)))

    @property
    def _bytes_of_samples(self) -> list[float]:
        return [source.sample_bytes for source in self._spec.sources if source.sample_bytes is not None]


class _Located:
    """An input's order, located in the input's own shards."""

    def __init__(self, planning: Planning, order: Order) -> None:
        self._planning, self._order = planning, order
        self.count, self.lanes, self.window_end = order.count, order.lanes, order.window_end

    def locate(self, positions: Ints) -> Places:
        return self._planning.locate(self._order, positions)
