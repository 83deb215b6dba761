"""torch's DataLoader, which has no state, and torchdata's StatefulDataLoader, over a map-style data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from resume_test.contestants import SEED, Contestant, NoStateError, Reads, Setting
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbers(Dataset[int]):
    """Sample n is the number n."""

    def __init__(self, samples: int, count: Reads) -> None:
        self.samples, self.count = samples, count

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return int(self.count(index))


class Plain(Contestant):
    """DataLoader(shuffle=True), or with a DistributedSampler."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        torch.manual_seed(SEED)
        self.data = Numbers(setting.samples, self.count)
        self.sampler = self._sampler() if setting.world > 1 else None
        self.loader = self._loader(
            batch_size=setting.batch_size,
            shuffle=self.sampler is None,
            sampler=self.sampler,
            num_workers=setting.num_workers,
        )

    def _sampler(self) -> Any:
        setting = self.setting
        return DistributedSampler(self.data, num_replicas=setting.world, rank=setting.rank, seed=SEED)

    def _loader(self, **options: Any) -> Any:
        return DataLoader(self.data, **options)

    def epoch(self, number: int) -> Iterator[list[int]]:
        if self.sampler is not None:
            self.sampler.set_epoch(number)
        return super().epoch(number)

    def state(self) -> Any:
        raise NoStateError


class Stateful(Plain):
    """StatefulDataLoader, with torchdata's own sampler where there are ranks."""

    def _sampler(self) -> Any:
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        setting = self.setting
        return StatefulDistributedSampler(self.data, num_replicas=setting.world, rank=setting.rank, seed=SEED)

    def _loader(self, **options: Any) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(self.data, **options)

    state = Contestant.state
