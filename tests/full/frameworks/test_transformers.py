"""Hugging Face's Trainer trains with our loader where its loader hook is overridden, and resumes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from full.frameworks.data import COUNT, assert_made_by_our_workers, data_of, keys_of
from transformers import Trainer, TrainingArguments

import headrace as hr
from headrace.integrations import prepare

BOTH = pytest.mark.parametrize("regime", ["torch", "headrace"])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.batches: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, made_by: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append({"x": x, "made_by": made_by})
        guess = self.line(x / COUNT)
        return {"loss": (guess - labels).square().mean(), "logits": guess}


class TorchDataTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        return prepare(self.accelerator, super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return prepare(self.accelerator, super().get_eval_dataloader(eval_dataset))


class StreamTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        loader: Any = hr.DataLoader(data_of("headrace"), batch_size=self._train_batch_size, shuffle=True, num_workers=1)
        return prepare(self.accelerator, loader)


def trained(regime: str, folder: Path, resume_from: Path | None = None, **options: Any) -> Model:
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2,
        save_strategy="steps", save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_num_workers=1,
        remove_unused_columns=False, log_level="error", logging_strategy="no", **options,
    )  # fmt: skip
    model = Model()
    kind, dataset = (TorchDataTrainer, data_of("torch")) if regime == "torch" else (StreamTrainer, None)
    kind(model=model, args=arguments, train_dataset=dataset).train(
        resume_from_checkpoint=str(resume_from) if resume_from else None
    )
    return model


@BOTH
def test_trainer_trains_with_our_engine_when_its_hook_is_overridden(regime: str, tmp_path: Path) -> None:
    batches = trained(regime, tmp_path).batches
    first, second = ([key for batch in batches[at : at + 3] for key in keys_of(batch)] for at in (0, 3))
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert_made_by_our_workers(batches)


@BOTH
def test_trainer_resumes_with_the_same_batches(regime: str, tmp_path: Path) -> None:
    whole = [keys_of(batch) for batch in trained(regime, tmp_path / "whole").batches]
    resumed = trained(regime, tmp_path / "rest", resume_from=tmp_path / "whole" / "checkpoint-4")
    assert [keys_of(batch) for batch in resumed.batches] == whole[4:]


def test_trainer_evaluates_with_our_engine_when_its_hook_is_overridden(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=5, report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_num_workers=1, remove_unused_columns=False,
    )  # fmt: skip
    model = Model()
    TorchDataTrainer(model=model, args=arguments, eval_dataset=data_of("torch")).evaluate()
    assert [keys_of(batch) for batch in model.batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert_made_by_our_workers(model.batches)
