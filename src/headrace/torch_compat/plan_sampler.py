"""What frameworks see as the sampler of a loader whose order is a plan's, and how they hand it back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DistributedSampler, SequentialSampler

from headrace.errors import OptionError


class _HasEpochs(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


class PlanSampler(DistributedSampler[int]):
    """The sampler of a loader in the headrace regime: it has a length and an epoch, and samples cannot be drawn of it.

    It is a DistributedSampler because that is what frameworks look for before they divide samples among ranks
    themselves, and what they tell the epoch.

    Args:
        dataset: the loader's data set.
        shuffle: whether the loader was asked to shuffle it.
        loader: told the epoch; not kept alive.
    """

    def __init__(self, dataset: object, shuffle: bool, loader: _HasEpochs) -> None:
        self.dataset: Any = dataset
        self.shuffle = shuffle
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        raise OptionError(
            f"samples of {type(self.dataset).__name__} come in the order of headrace's plan, which torch's DataLoader "
            "cannot follow; was the loader rebuilt by Accelerate? Then use headrace.frameworks.prepare"
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` of the loader begin this epoch."""
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)


class SamplerOrder(NamedTuple):
    """What samplers that name no order of their own say: None where they leave it to the loader's other arguments."""

    shuffle: bool
    batch_size: int | None
    drop_last: bool | None


def order_of(dataset: object, sampler: object, batch_sampler: object) -> SamplerOrder:
    """What these samplers say of a data set that a plan orders.

    Frameworks that make a loader anew hand back its sampler, or one that goes through the data set from its first
    sample to its last, and may wrap either into a batch sampler.

    Raises:
        OptionError: only they know their order.
    """
    inner = sampler if batch_sampler is None else batch_sampler
    while hasattr(inner, "sampler"):
        inner = inner.sampler
    if isinstance(inner, PlanSampler) and inner.dataset is dataset:
        shuffle = inner.shuffle
    elif isinstance(inner, SequentialSampler) and inner.data_source is dataset:
        shuffle = False
    else:
        name, value = ("sampler", sampler) if batch_sampler is None else ("batch_sampler", batch_sampler)
        raise OptionError(f"{name}={value!r} is not supported for {type(dataset).__name__}; use its operators")
    if batch_sampler is None:
        return SamplerOrder(shuffle, None, None)
    return SamplerOrder(shuffle, getattr(batch_sampler, "batch_size", None), getattr(batch_sampler, "drop_last", None))
