"""`.shuffle()`: permutations of an epoch's samples, planned or within windows of what is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._util import check
from headrace._util.functions import as_it_is
from headrace.ops.operator import EachSample, GroupOperator, PassOperator
from headrace.order.orders import Order, ShuffledOrder
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.workers.randomness import rng
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream
    from headrace.pipeline.compile import PipelineBuilder

WINDOW_SAMPLES, WINDOW_BATCHES = 2048, 16  # default windows for derived samples


@dataclass(frozen=True, slots=True)
class Shuffle(PassOperator):
    """Permutes samples. All kinds but "buffer" go by position."""

    needs_numbers = False  # readers shuffle samples without numbers, and name that shuffle in states
    by: str
    window: int | None
    seed: int | None
    buffer: int | None = None

    @property
    def text(self) -> str:
        return f"shuffle({self.by})"

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """Permute all samples. Readers handle shuffles of shards and of windows."""
        return ShuffledOrder(order, key)

    @property
    def keeps_position(self) -> bool:
        """True if a sample's position determines which sample it is."""
        return self.by != "buffer"

    @property
    def shuffle(self) -> Shuffle:
        return self

    def seed_or(self, loaders: int) -> int:
        return loaders if self.seed is None else self.seed

    def in_words(self, by: str, sizes: str = "") -> str:
        """Return the text in a state for a shuffle of this kind."""
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"shuffle({by}{sizes}{seed})"

    def add_to(self, builder: PipelineBuilder) -> None:
        """Permute the source's samples in the plan if possible, else windows of samples as they come."""
        order, source = builder.order, builder.source
        is_first = not order.operators or (source.traits.numbered and order.shuffle is None)
        if is_first and builder.is_single and not builder.is_in_epoch and source.can_permute(self.by):
            builder.add_to_order(self)
            return
        if self.by not in ("auto", "window"):
            samples = "samples that are made of others, have an order of their own or are shuffled already"
            raise check.invalid(".shuffle(): by", self.by, f"'window' for {samples}")
        from headrace.ops.batch import EvenBatcher

        is_batched = builder.has_batches
        size = self.window or (WINDOW_BATCHES if is_batched else WINDOW_SAMPLES)
        name = self.in_words("window", f", samples={size}")
        batcher = partial(EvenBatcher, size, drop_last=False)
        builder.add_group(GroupOperator(name, batcher, collate=as_it_is, makes_batches=is_batched))
        builder.each.append(EachSample(Step("shuffle", "many", WindowShuffle(self.seed))))

    def check(self, pipeline: Pipeline) -> None:
        """Raise OptionError if the source, or another operator, does not allow it."""
        source, selection = pipeline.source, pipeline.order.by_numbers
        if source.traits.numbered and self.by == "buffer":
            needed = "'window' or 'global' for samples with numbers, which mix better"
            raise check.invalid(".shuffle(): by", self.by, needed)
        if selection is not None and self.by in ("window", "shards", "within"):
            raise check.conflict(f".{selection.text}", f".shuffle(by={self.by!r})", "windows have no numbers")
        if not source.traits.numbered or (source.is_compressed and not pipeline.is_by_number):
            self.check_as_read(source.only_in_order or source.without_numbers)

    def check_as_read(self, remedy: str | None = None) -> None:
        """Raise OptionError if shards that are read sequentially do not allow it."""
        if self.by in ("global", "within"):
            remedy = remedy or "make an index of plain ones: headrace index URL…, and hr.stream(…, index='auto')"
            cause = "shards without an index, or compressed ones"
            raise refusal("numbers", f".shuffle(by={self.by!r})", cause, remedy=f"by='window' works; {remedy}")


class WindowShuffle:
    """Permutes the samples of a window, depending on (seed, epoch, position of the window).

    Args:
        seed: Combined with the loader's seed. None: the loader's seed alone.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def __call__(self, samples: list[Any]) -> list[Any]:
        generator = rng()
        if self._seed is not None:
            generator = np.random.default_rng([self._seed, int(generator.integers(2**63))])
        return [samples[k] for k in generator.permutation(len(samples))]


def shuffled(stream: Stream, by: str, window: int | None, buffer: int | None, seed: int | None) -> Stream:
    check.one_of(".shuffle(): by", by, ("auto", "shards", "within", "window", "global", "buffer"))
    for name, value in (("window", window), ("buffer", buffer)):
        check.whole_or_none(f".shuffle(): {name}", value, 1)
        if value is not None and by not in ("auto", name):
            raise check.conflict(f".shuffle(): by={by!r}", f"{name}={value}", f"{name}= is for by={name!r}")
    if by == "global" and stream.pipeline().source.only_in_order is None:
        stream = stream.indexed(".shuffle(by='global') needs")
    return stream._with(Shuffle("buffer" if buffer is not None else by, window, seed, buffer))
