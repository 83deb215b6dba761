"""A model that stores its batches, and Lightning's Trainer without output."""

from __future__ import annotations

from typing import Any

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.batches: list[Any] = []
        self.epochs: list[int] = []  # of each training step

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.batches.append(batch)
        self.epochs.append(self.current_epoch)
        return self.line(torch.ones(1, 1)).square().mean()

    def validation_step(self, batch: Any, number: int) -> None:
        self.batches.append(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer(**options: Any) -> lightning.Trainer:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(**{"accelerator": "cpu", "devices": 1, **dict.fromkeys(names, False), **options})
