"""`.batch()`, `.padded_batch()`, `.collate()` and `.unbatch()`: batches of samples in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._util import check
from headrace._util.check import is_time
from headrace._util.functions import name_of
from headrace.ops.operator import EachSample, GroupOperator, Operator
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.pipeline.compile import PipelineBuilder


@dataclass(frozen=True, slots=True)
class Batch(Operator):
    """Batches of `size` samples. `collate` None: the loader's collation, or the default."""

    size: int
    drop_last: bool
    collate: Callable[[list[Any]], object] | None = None
    name: str = "batch"

    @property
    def text(self) -> str:
        return f"{self.name}({self.size})"

    def count(self, count: int) -> int:
        return count // self.size if self.drop_last else -(-count // self.size)

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.add_batch(self)

    def collated(self, fn: Callable[[list[Any]], object]) -> Batch | None:
        return replace(self, collate=fn) if self.collate is None else None

    @property
    def whole(self) -> Batch:
        return replace(self, drop_last=True)

    def within(self, max_wait_s: float) -> GroupOperator:
        """Return the operator with a maximum waiting time. OptionError if it is invalid."""
        if not is_time(max_wait_s):
            raise check.invalid(f".{self.name}({self.size}): max_wait_s", max_wait_s, "a number of seconds above 0")
        name = f"{self.name}({self.size}, max_wait_s={max_wait_s:g})"
        group = replace(self.on_the_way, name=name, makes_batches=True, max_wait_s=float(max_wait_s))
        return group.whole if self.drop_last else group

    @property
    def on_the_way(self) -> GroupOperator:
        """The grouping to use if more than functions of batches follows."""
        last = ", drop_last=True" if self.drop_last else ""
        batcher = partial(EvenBatcher, self.size, drop_last=self.drop_last)
        return GroupOperator(f"{self.name}({self.size}{last})", batcher, collate=self.collate)


class EvenBatcher:
    """Groups of `size` samples, in order. The last one may be shorter."""

    def __init__(self, size: int, *, drop_last: bool) -> None:
        self._size, self._drop_last, self._offered = size, drop_last, 0

    def offer(self, measure: int) -> Sequence[int]:
        self._offered += 1
        return range(self._offered) if self._offered == self._size else ()

    def end(self) -> Sequence[int]:
        return () if self._drop_last else range(self._offered)


def batch(n: int, drop_last: bool, max_wait_s: float | None) -> Operator:
    check.whole(".batch(): n", n, 1)
    made = Batch(n, drop_last)
    return made if max_wait_s is None else made.within(max_wait_s)


def padded_batch(n: int, pad_value: float | Mapping[str, float], drop_last: bool) -> Batch:
    from headrace.torch_compat.padded import PaddedCollate

    check.whole(".padded_batch(): n", n, 1)
    return Batch(n, drop_last, PaddedCollate(pad_value), "padded_batch")


def collate(fn: Callable[[list[Any]], object] | None) -> EachSample:
    if fn is None:
        from headrace.torch_compat.collate import default_collate

        fn = default_collate
    check.function(".collate(): fn", fn, is_plain=True)
    return EachSample(Step(f"collate({name_of(fn)})", "map", fn), is_collate=True)


def unbatch() -> EachSample:
    return EachSample(Step("unbatch()", "many", Unbatch()), is_unbatch=True)


class Unbatch:
    """Splits a batch into samples; the inverse of `default_collate`."""

    def __call__(self, batch: object) -> list[object]:
        return list(_samples(batch))


def _samples(batch: Any) -> Sequence[Any]:
    """Split a batch, or a part of one, by sample."""
    if _is_leaf(batch):
        if not getattr(batch, "shape", (1,)):
            raise ValueError("unbatch: a number is no batch; an array has a first dimension, which counts the samples")
        leaf: Sequence[Any] = batch
        return leaf
    if isinstance(batch, Mapping):
        return [dict(zip(batch, fields, strict=True)) for fields in _together(batch.values())]
    if isinstance(batch, list | tuple):
        if hasattr(batch, "_fields"):
            return [type(batch)(*fields) for fields in _together(batch)]
        return list(_together(batch))
    raise TypeError(
        f"unbatch: a batch of type {type(batch).__name__} is not known; "
        "arrays, tensors, and dicts and tuples of them are; .flat_map(fn) takes apart what `fn` knows"
    )


def _is_leaf(batch: object) -> bool:
    """True for one field of all samples: an array, or texts."""
    if isinstance(batch, np.ndarray) or hasattr(batch, "untyped_storage"):
        return True
    return isinstance(batch, Sequence) and bool(batch) and all(isinstance(one, str | bytes) for one in batch)


def _together(batches: Iterable[object]) -> Iterable[tuple[Any, ...]]:
    fields = [_samples(batch) for batch in batches]
    counts = sorted(set(map(len, fields)))
    if len(counts) != 1:
        given = " and ".join(map(str, counts)) or "no"
        raise ValueError(f"unbatch: the fields of a batch must have as many samples each; these have {given}")
    return zip(*fields, strict=True)
