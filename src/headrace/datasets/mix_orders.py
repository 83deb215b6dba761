"""The orders of a mixture: those of its sources, put together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from headrace.datasets.mix_spec import MixSpec
from headrace.datasets.planning import Planning
from headrace.datasets.source import SampleSource, SourceOrders
from headrace.errors import OptionError
from headrace.plan import Order, Passes, Places
from headrace.plan.mixture import MixOrder
from headrace.types import Ints

_WINDOW_SAMPLES = 16384  # of each source
_WINDOW_BYTES = 128 * 2**20
_PASSES = 2**32  # more than any source comes in one pass of the mixture
_BLOCKS = 2**40  # as many as show shares exactly enough


class MixOrders(SourceOrders):
    """The orders of a mixture's samples.

    Args:
        source: the mixture.
        mixed: what it is mixed of.
        plannings: of its sources.
        seed: of the mixture.
    """

    def __init__(self, source: SampleSource, mixed: MixSpec, plannings: Sequence[Planning], seed: int) -> None:
        super().__init__(source, ())
        self._mixed, self._plannings, self._seed = mixed, plannings, seed
        counts = [len(one.starts) - 1 for one in mixed.sources]
        self._first_shards = np.cumsum([0, *counts])[:-1].tolist()

    @property
    def count(self) -> int:
        """Samples of an epoch."""
        return self._mixed.layout.count

    @cached_property
    def sizes(self) -> Ints:
        """How many samples each shard of each source has."""
        return np.concatenate([planning.sizes for planning in self._plannings])

    def order(self, epoch: int, number: int) -> MixOrder:
        """Which samples come in one pass over the mixture."""
        sources = [Passes(partial(self._pass, planning, epoch, number * _PASSES), None) for planning in self._plannings]
        for name, source, count in zip(self._mixed.names, sources, self._mixed.layout.sizes, strict=True):
            if source.pass_count != count:
                raise OptionError(f"source {name!r} has {source.pass_count} samples in epoch {epoch}, and not {count}")
        key = self._seed, epoch, number
        return MixOrder(sources, self._mixed.layout, key, self._first_shards, self._window)

    @staticmethod
    def _pass(planning: Planning, epoch: int, first: int, turn: int) -> Order:
        return _Located(planning, planning.one_pass(epoch, first + turn))

    @property
    def full_count(self) -> int | None:
        """How many samples come until each source has come in full; None: nobody knows."""
        if self._mixed.is_changing:
            return None
        layout = self._mixed.layout
        counts = layout.before(_BLOCKS)
        return max(-(-size * sum(counts) // some) for size, some in zip(layout.sizes, counts, strict=True) if some)

    def described(self) -> list[str]:
        """The mixture as a state names it: how it is mixed, and each source's own order."""
        described = [self._mixed.described()]
        for name, planning in zip(self._mixed.names, self._plannings, strict=True):
            described += [f"{name}: {line}" for line in planning.described()]
        return described

    @property
    def fingerprint(self) -> str:
        """What tells these data from other data."""
        described = [
            f"{name}={planning.fingerprint}" for name, planning in zip(self._mixed.names, self._plannings, strict=True)
        ]
        return hashlib.blake2b("\n".join(described).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    @property
    def window_bytes(self) -> int:
        """About how many bytes the samples of a window have that is read before any of it is used.

        They are as many as those of a window of each source. So a source's share of a window is about one of its own
        windows, whose samples lie near one another.
        """
        if self._source.sample_bytes is None:
            return 0
        sequential = (min(_WINDOW_SAMPLES * nbytes, _WINDOW_BYTES) for nbytes in self._bytes_of_samples)
        windows = (planning.window_bytes for planning in self._plannings)
        return int(sum(window or some for window, some in zip(windows, sequential, strict=True)))

    @property
    def _window(self) -> int:
        """How many samples a window has."""
        if self._source.sample_bytes is None:
            return _WINDOW_SAMPLES
        each, counts = self._bytes_of_samples, self._mixed.layout.before(1)
        mean, count = max(each), sum(counts)
        if count and not self._mixed.is_changing:
            mean = sum(some * nbytes for some, nbytes in zip(counts, each, strict=True)) / count
        return max(1, int(self.window_bytes / max(1.0, mean)))

    @property
    def _bytes_of_samples(self) -> list[float]:
        """The mean size of each source's samples."""
        return [source.sample_bytes for source in self._mixed.sources if source.sample_bytes is not None]


class _Located:
    """A source's order, whose samples lie where the source has them."""

    def __init__(self, planning: Planning, order: Order) -> None:
        self._planning, self._order = planning, order
        self.count, self.lanes, self.window_end = order.count, order.lanes, order.window_end

    def locate(self, positions: Ints) -> Places:
        return self._planning.locate(self._order, positions)
