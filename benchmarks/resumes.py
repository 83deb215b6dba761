"""How long it takes until a run that goes on at step 1,000,000 has its first batch, and what is read for that.

Each framework trains a model of one weight on a data set of 20,000,000 numbers in batches of 8, shuffled, and goes on
in the first epoch. "Trainer, torch's loader" is what Trainer does by itself. Each run is a process of its own; the time
is from where training is asked for until the first step. It needs what `nox -s frameworks` installs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import tables
import torch

import headrace as hr

COUNT, BATCH, STEP = 20_000_000, 8, 1_000_000


class Numbers(hr.AsyncDataset):
    """It counts how often it is asked."""

    asked = 0

    def __len__(self) -> int:
        return COUNT

    async def aget(self, key: int) -> dict[str, torch.Tensor]:
        Numbers.asked += 1
        return {"x": torch.tensor([key / COUNT]), "labels": torch.tensor([1.0])}


class TorchNumbers(torch.utils.data.Dataset[Any]):
    """The same for torch's loader."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, key: int) -> dict[str, torch.Tensor]:
        Numbers.asked += 1
        return {"x": torch.tensor([key / COUNT]), "labels": torch.tensor([1.0])}


class ReachedError(Exception):
    """The first step."""


def loader_of(data: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(data.shuffle(), batch_size=BATCH)


def state_at(step: int) -> dict[str, Any]:
    """The loader's state after so many steps."""
    with loader_of(Numbers()) as loader:
        loader.skip(step)
        return loader.state_dict()


def plain() -> float:
    """A loop of one's own."""
    state = state_at(STEP)
    began = time.perf_counter()
    with loader_of(Numbers()) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - began


def lightning() -> float:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            raise ReachedError

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    state = state_at(STEP)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **dict.fromkeys(quiet, False))
    began = time.perf_counter()
    with loader_of(Numbers()) as loader:
        loader.load_state_dict(state)
        try:
            trainer.fit(Model(), loader)
        except ReachedError:
            return time.perf_counter() - began
    raise AssertionError("no step was made")


def torchtitan() -> float:
    """What its checkpoint does with the component: one is asked for its state, another is given it."""
    from headrace.integrations import TitanState

    saved = {"all_ranks": json.dumps(state_at(STEP))}
    began = time.perf_counter()
    with loader_of(Numbers()) as loader:
        component = TitanState(loader, 0)
        component.state_dict()  # torch's checkpoints ask for the form of what they load
        component.load_state_dict(saved)
        next(iter(loader))
        return time.perf_counter() - began


def transformers(*, is_ours: bool = True) -> float:
    from transformers import Trainer, TrainingArguments

    from headrace.integrations import prepare

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.raises = torch.nn.Linear(1, 1), False

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.raises:
                raise ReachedError
            return {"loss": (self.line(x) - labels).square().mean()}

    class OurTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return prepare(self.accelerator, loader_of(Numbers())) if is_ours else super().get_train_dataloader()

    def trainer(model: Model, steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH, max_steps=steps, save_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        return OurTrainer(model=model, args=arguments, train_dataset=None if is_ours else TorchNumbers())

    with tempfile.TemporaryDirectory() as folder:
        trainer(Model(), 1).train()
        path = Path(folder, "checkpoint-1", "trainer_state.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"global_step": STEP}))
        model, Numbers.asked = Model(), 0
        model.raises = True
        again = trainer(model, STEP + 2)
        began = time.perf_counter()
        try:
            again.train(resume_from_checkpoint=str(path.parent))
        except ReachedError:
            return time.perf_counter() - began
    raise AssertionError("no step was made")


RUNS: dict[str, Callable[[], float]] = {
    "a loop of one's own": plain,
    "Lightning": lightning,
    "torchtitan": torchtitan,
    "Trainer": transformers,
    "Trainer, torch's loader": lambda: transformers(is_ours=False),
}


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        warnings.simplefilter("ignore")
        print(json.dumps([RUNS[given.one](), Numbers.asked]))
        return
    found: dict[str, list[list[float]]] = {name: [] for name in RUNS}
    for _ in range(given.runs):
        for name, results in found.items():
            command = [sys.executable, __file__, "--one", name]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(said.splitlines()[-1]))
    rows = [
        [name, f"{median(took for took, _ in results):.2f}", f"{median(asked for _, asked in results):.0f}"]
        for name, results in found.items()
    ]
    print(tables.markdown(["", "s to the first step", "samples asked for"], rows))


if __name__ == "__main__":
    main()
