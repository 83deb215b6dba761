"""Frameworks on real ranks: each sample once, also if the last step is short."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gloo import ranks_of

COMMON = """
import itertools, torch, torch.distributed as dist
from torch.utils.data import TensorDataset
import headrace as hr

class Keys(hr.AsyncDataset):
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    async def aget(self, key): return key
"""
ACCELERATE = (
    COMMON
    + """
from accelerate import Accelerator, DataLoaderConfiguration
from headrace.integrations import prepare

def main(count, dispatches):
    configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    seen = {"short": [], "refused": "", "objects": [], "drop": [], "torch": []}
    try:
        with hr.DataLoader(Keys(count), batch_size=4) as loader:
            next(iter(prepare(accelerator, loader)))
    except hr.OptionError as error:
        seen["refused"] = str(error)
    with hr.DataLoader(Keys(count), batch_size=4, ranks=hr.Ranks(last_batch="short")) as loader:
        for batch in prepare(accelerator, loader):
            seen["short"].append(batch.tolist())
            gathered = accelerator.gather_for_metrics([batch.tolist()], use_gather_object=True)
            seen["objects"] += itertools.chain(*gathered)
    with hr.DataLoader(Keys(count), batch_size=4, ranks=hr.Ranks(last_batch="drop")) as loader:
        for batch in prepare(accelerator, loader):
            seen["drop"] += accelerator.gather_for_metrics(batch).tolist()
    with hr.DataLoader(TensorDataset(torch.arange(count)), batch_size=4) as loader:
        for (batch,) in prepare(accelerator, loader):
            seen["torch"] += accelerator.gather_for_metrics(batch).tolist()
    accelerator.end_training()
    return seen
"""
)
LIGHTNING = (
    COMMON
    + """
import lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line, self.got, self.seen = torch.nn.Linear(1, 1), [], 0
    def training_step(self, batch, number):
        self.got.append(batch.tolist())
        return self.line(batch[:, None].float()).square().mean()
    def validation_step(self, batch, number):
        self.seen += len(batch)
    def on_validation_epoch_end(self):
        self.seen = int(self.all_gather(torch.tensor(self.seen)).sum())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

def main(count):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    world = int(__import__("os").environ["WORLD_SIZE"])
    trainer = lightning.Trainer(accelerator="cpu", devices=world, strategy="ddp", max_epochs=1,
                                num_sanity_val_steps=0, **quiet)
    model = Model()
    data = Keys(count).map(lambda key: key)
    with hr.DataLoader(data, batch_size=4) as train, hr.DataLoader(data, batch_size=4) as other:
        trainer.fit(model, train, other)
    return {"got": model.got, "seen": model.seen}
"""
)
COUNTS = pytest.mark.parametrize(("world", "count"), [(2, 21), (3, 25)])


def flat(lists: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.timeout(180)
@COUNTS
@pytest.mark.parametrize("dispatches", [False, True])
def test_accelerate_gathers_each_sample_once_when_the_last_step_is_short(
    world: int, count: int, dispatches: bool
) -> None:
    seen = ranks_of(world, ACCELERATE, (count, dispatches), {"ACCELERATE_USE_CPU": "true"})
    assert sorted(flat(flat(rank["short"]) for rank in seen)) == list(range(count))
    assert len({len(rank["short"]) for rank in seen}) == 1
    for rank in seen:
        assert "last_batch='drop'" in rank["refused"]
        assert sorted(rank["objects"]) == list(range(count))
        assert sorted(rank["drop"]) == list(range(count - count % (4 * world)))
        assert rank["torch"] == list(range(count)), "as Accelerate was configured"


@pytest.mark.timeout(180)
@COUNTS
def test_lightning_trains_on_each_sample_once_when_the_last_step_is_short(world: int, count: int) -> None:
    seen = ranks_of(world, LIGHTNING, (count,))
    assert sorted(flat(flat(rank["got"]) for rank in seen)) == list(range(count))
    assert len({len(rank["got"]) for rank in seen}) == 1
    assert all(rank["seen"] == count for rank in seen)
