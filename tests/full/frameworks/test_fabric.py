"""Fabric wraps our loader and leaves it alone; with ranks it makes a new one with its own sampler."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from full.frameworks.data import COUNT, KINDS, assert_made_by_our_workers, data_of, keys_of, loader_of
from torch.utils.data import DistributedSampler

import headrace as hr


@pytest.mark.parametrize("regime", ["torch", "headrace"])
def test_fabric_iterates_our_loader_when_it_wraps_it(regime: str) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    loader = hr.DataLoader(data_of(regime), batch_size=4, shuffle=True, num_workers=1)
    wrapped: Any = fabric.setup_dataloaders(loader)
    assert wrapped._dataloader is loader
    assert len(wrapped) == 3
    for _ in range(2):
        batches = list(wrapped)
        assert sorted(key for batch in batches for key in keys_of(batch)) == list(range(COUNT))
        assert_made_by_our_workers(batches)
    loader.close()


def test_epochs_are_in_different_orders_when_a_loop_over_fabrics_loader_ends_early() -> None:
    """Fabric counts the calls of iter and passes the count to the sampler."""
    loader = hr.DataLoader(data_of("headrace"), batch_size=4, shuffle=True, num_workers=1)
    wrapped = lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    first, second = ([keys_of(batch) for batch, _ in zip(wrapped, range(3), strict=False)] for _ in range(2))
    assert first != second
    loader.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [2, 7])
def test_fabric_resumes_exactly_from_its_checkpoint(kind: str, steps: int, tmp_path: Path) -> None:
    """Its loop takes no batch ahead; the loader that was set up has no state, ours has."""
    place = tmp_path / "saved"

    def run(loader: hr.DataLoader[Any], *, saves: bool) -> Iterator[list[int]]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        wrapped, step = fabric.setup_dataloaders(loader), 0
        if not saves and place.exists():
            loader.load_state_dict(fabric.load(place)["loader"])
        for _ in range(2):
            for batch in wrapped:
                step += 1
                if saves and step == steps:
                    fabric.save(place, {"loader": loader.state_dict()})
                yield batch.tolist()

    torch.manual_seed(0)
    with loader_of(kind) as loader:
        whole = list(run(loader, saves=True))
    torch.manual_seed(steps)
    with loader_of(kind) as loader:
        assert list(run(loader, saves=False))[: 10 - steps] == whole[steps:]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[None]:
    """A group of one process, which frameworks take for a distributed run."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("regime", ["torch", "headrace"])
def test_fabric_divides_torchs_data_alone_when_there_are_ranks(regime: str, ranks: None) -> None:
    """Samples of our data sets are the loader's to divide: there Fabric finds that it is done."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    loader = hr.DataLoader(data_of(regime), batch_size=4, num_workers=1, timeout=33)
    wrapped: Any = fabric.setup_dataloaders(loader)
    inside = wrapped._dataloader
    assert type(inside) is hr.DataLoader
    assert inside.timeout == 33
    assert isinstance(inside.sampler, DistributedSampler)
    assert (inside is loader) == (regime == "headrace")
    assert_made_by_our_workers(wrapped)
    loader.close()


def test_warning_names_the_epoch_when_fabric_counts_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers: Any = importlib.import_module("lightning.fabric.wrappers")
    with hr.DataLoader(data_of("headrace"), batch_size=4, shuffle=True) as loader:
        loader.set_epoch(1)
        next(iter(loader))
        state = loader.state_dict()
    with hr.DataLoader(data_of("headrace"), batch_size=4, shuffle=True) as loader:
        wrapped: Any = lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
        loader.load_state_dict(state)
        monkeypatch.delattr(wrappers, "_FabricDataLoader")
        with pytest.warns(RuntimeWarning, match="Fabric counts epochs in a way that is not known.*than epoch 1"):
            next(iter(wrapped))
