"""The options of a loader that sessions of torch data sets use."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
import torch.utils.data

from headrace.work.executor import Executor

T_co = TypeVar("T_co", covariant=True)


class TorchLoader(torch.utils.data.DataLoader[T_co]):
    """A loader with headrace's options, which `headrace.DataLoader` documents."""

    seed: int | None
    memory_budget: int | str
    workers: Literal["process", "thread"] | Executor
    economic: bool
    num_batch_workers: int | None
    num_workers_batches: int | None
    snapshot_every_n_steps: int | None
    device: torch.device | str | int | None
