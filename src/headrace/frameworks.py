"""The loader inside training frameworks that would rebuild it: there its engine is kept.

Lightning, Fabric and torchtitan take a loader as it is. Accelerate's `prepare` makes a loader of torch's class out of
any it is given; `prepare` here does what that does, and keeps headrace's engine.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from headrace.errors import OptionError
from headrace.loader import DataLoader


def prepare(accelerator: Any, loader: Any) -> Any:
    """What `accelerator.prepare(loader)` gives, with headrace's engine behind it.

    Batches are on the accelerator's device, gradient accumulation sees the end of an epoch, and ranks divide samples:
    for torch's data sets as Accelerate was configured, for headrace's as the loader was. It may be passed to
    `accelerator.prepare` together with the model; that leaves it as it is.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: an `hr.DataLoader`; or a torch loader, or what `accelerator.prepare` or `skip_first_batches` made of
            one, whose engine is replaced.

    Returns:
        A loader of Accelerate's class.

    Raises:
        OptionError: Accelerate was told to use torchdata's StatefulDataLoader, which has its own engine.
    """
    if getattr(accelerator, "use_stateful_dataloader", False):
        raise OptionError("use_stateful_dataloader=True asks Accelerate for torchdata's engine; use one or the other")
    if hasattr(loader, "base_dataloader"):
        return _with_our_engine(loader, loader.base_dataloader)
    if getattr(loader, "regime", "torch") == "torch":
        return _with_our_engine(accelerator.prepare_data_loader(loader), loader)
    prepared = _prepared_batches(accelerator, loader)
    prepared._is_accelerate_prepared = True
    return accelerator.prepare_data_loader(prepared)  # which it only notes, prepared as it is


class Batches(torch.utils.data.IterableDataset[Any]):
    """The batches of a loader as an iterable data set of torch's, for frameworks that insist on a loader of their own.

    That loader must not batch again and must have no workers: `batch_size=None, num_workers=0`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` begin this epoch."""
        self.loader.set_epoch(epoch)


def _prepared_batches(accelerator: Any, loader: DataLoader[Any]) -> Any:
    # As for one process: which samples are this rank's was settled by the loader. A data set of batches, not the
    # loader itself, is put into Accelerate's, as `skip_first_batches` makes a new loader from the data set.
    prepare_data_loader = importlib.import_module("accelerate.data_loader").prepare_data_loader
    batches: Any = torch.utils.data.DataLoader(Batches(loader), batch_size=None, collate_fn=_unchanged)
    return prepare_data_loader(
        batches,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )


def _with_our_engine(prepared: Any, source: Any) -> Any:
    """The same loader of Accelerate's; the one inside it has its data and order, and the other options of `source`."""
    base = prepared.base_dataloader
    if isinstance(base, DataLoader) or isinstance(base.dataset, Batches):
        return prepared
    options: dict[str, Any] = {
        name: getattr(base, name, getattr(source, name, None))
        for name in inspect.signature(DataLoader).parameters
        if hasattr(base, name) or hasattr(source, name)
    }
    for name in _made_by_torch(base):
        del options[name]
    prepared.base_dataloader = DataLoader(**options)
    prepared._is_accelerate_prepared = True
    return prepared


def _made_by_torch(loader: Any) -> tuple[str, ...]:
    """Attributes that follow from others, and are refused beside those."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return "sampler", "batch_sampler"
    return ("batch_sampler",) if loader.batch_sampler is None else ("sampler", "batch_size", "drop_last")


def _unchanged(batch: Any) -> Any:
    return batch
