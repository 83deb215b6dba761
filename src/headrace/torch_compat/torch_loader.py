"""The base class of loaders, and the sampler of loaders whose order is headrace's plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.options import Economic
    from headrace.workers.executor import Executor

T_co = TypeVar("T_co", covariant=True)


class TorchLoader(DataLoader[T_co]):
    """A loader with headrace's options, which `headrace.DataLoader` documents."""

    seed: int | None
    memory_budget: int | str
    workers: Literal["process", "thread"] | Executor
    economic: bool | Economic
    snapshot_every_n_steps: int | None
    device: torch.device | str | int | None


class _HasEpochs(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


class PlanSampler(DistributedSampler[int]):
    """Sampler of a loader of headrace's data sets: a length and an epoch, but no indices.

    It is a DistributedSampler because frameworks look for one before they split samples among ranks, and call its
    `set_epoch`.
    """

    def __init__(self, dataset: object, shuffle: bool, loader: _HasEpochs) -> None:
        self.dataset: Any = dataset
        self.shuffle = shuffle
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        raise OptionError(
            f"samples of {type(self.dataset).__name__} come in the order of headrace's plan, which torch's DataLoader "
            "cannot follow; was the loader rebuilt by Accelerate? Then use headrace.integrations.prepare"
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)


class SamplerOrder(NamedTuple):
    """Settings implied by samplers without their own order. None: the loader's options decide."""

    shuffle: bool
    batch_size: int | None
    drop_last: bool | None


def order_of(dataset: object, sampler: object, batch_sampler: object) -> SamplerOrder:
    """Return the settings implied by samplers for a data set that is ordered by a plan.

    Frameworks that rebuild a loader pass back its sampler, or a sequential one. They may wrap either in a batch
    sampler.

    Raises:
        OptionError: the samplers have their own order.
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
