"""States inside frameworks that take a batch ahead: the one after the batches that were trained on is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from full.frameworks.whence import COUNT, TorchData, assert_made_by_our_workers, data_of, keys_of
from torch.utils.data import DistributedSampler

import headrace as hr
from headrace.integrations import prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:::pytorch_lightning"),
]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader_of(data: Any = None) -> hr.DataLoader[Any]:
    return hr.DataLoader(data_of("headrace").shuffle() if data is None else data, batch_size=2, num_workers=1)


def all_keys() -> list[list[list[int]]]:
    with loader_of() as loader:
        return [[keys_of(batch) for batch in loader] for _ in range(2)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


@pytest.mark.parametrize("trained", [1, 3, 5])
def test_state_after_the_trained_batches_gives_the_rest_when_accelerate_is_one_ahead(
    accelerator: Accelerator, trained: int
) -> None:
    first, second = all_keys()
    loader = loader_of()
    got, state = [], {}
    for number, batch in enumerate(prepare(accelerator, loader), 1):
        got.append(keys_of(batch))
        if number == trained:
            assert loader.position.batch == trained + 1, "Accelerate has taken one more"
            state = through_json(loader.state_dict(batches=number))
            break
    loader.close()
    with loader_of() as loader:
        loader.load_state_dict(state)
        prepared = prepare(accelerator, loader)
        got += [keys_of(batch) for batch in prepared]
        assert got == first
        assert [keys_of(batch) for batch in prepared] == second


def of_torch(num_workers: int = 1) -> hr.DataLoader[Any]:
    return hr.DataLoader(TorchData(), batch_size=2, shuffle=True, num_workers=num_workers)


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("trained", [1, 3, 6])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_of_the_prepared_loader_gives_the_rest_when_the_data_is_torchs(
    accelerator: Accelerator, num_workers: int, trained: int, by_number: bool
) -> None:
    prepared = prepare(accelerator, of_torch(num_workers))
    list(prepared)
    got, state = [], {}
    for number, batch in enumerate(prepared, 1):
        got += keys_of(batch)
        if number == trained:
            inside = prepared.base_dataloader
            state = through_json(inside.state_dict(batches=number) if by_number else prepared.state_dict())
            break
    torch.manual_seed(977)
    other = prepare(accelerator, of_torch(num_workers))
    other.load_state_dict(state)
    if trained < 6:
        rest = list(other)
        if num_workers:
            assert_made_by_our_workers(rest)
        got += [key for batch in rest for key in keys_of(batch)]
    elif by_number:
        assert list(other) == [], "the state is of the epoch that has ended"
    assert sorted(got) == sorted(key for batch in other for key in keys_of(batch)) == list(range(COUNT))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_goes_on_with_its_share_when_accelerate_divides(accelerator: Accelerator, rank: int) -> None:
    def make(ranks: int) -> Any:
        loader: Any = hr.DataLoader(TorchData(), batch_size=2, num_workers=1)
        return prepare(accelerator, prepare_data_loader(loader, num_processes=ranks, process_index=rank))

    prepared = make(2)
    for _ in prepared:
        state = prepared.state_dict()
        break
    expected = [[4, 5], [8, 9]] if rank == 0 else [[6, 7], [10, 11]]
    other = make(2)
    other.load_state_dict(state)
    assert [keys_of(batch) for batch in other] == expected
    with pytest.raises(hr.StateMismatchError, match=r"num_replicas: .*2 in the state, 3 in the loader"):
        make(3).load_state_dict(state)


def orders_after_a_resume(accelerator: Accelerator, make: Any) -> list[bool]:
    prepared = prepare(accelerator, make())
    list(prepared)
    head = keys_of(next(iter(prepared)))
    state = prepared.state_dict()
    answers = []
    for is_told in (True, False):
        other = prepare(accelerator, make())
        other.load_state_dict(state)
        if is_told:
            other.set_epoch(1)
        keys = head + [key for batch in other for key in keys_of(batch)]
        answers.append(sorted(keys) == list(range(COUNT)))
    return answers


def test_order_goes_on_when_the_prepared_loader_is_told_the_epoch_and_when_it_is_not(accelerator: Accelerator) -> None:
    def make() -> hr.DataLoader[Any]:
        sampler: Any = DistributedSampler(TorchData(), num_replicas=1, rank=0)
        return hr.DataLoader(TorchData(), batch_size=2, sampler=sampler, num_workers=1)

    assert orders_after_a_resume(accelerator, make) == [True, True]


def test_order_goes_on_when_the_seedable_sampler_has_a_seed(accelerator: Accelerator) -> None:
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    assert orders_after_a_resume(accelerator, of_torch) == [True, True]


def test_prepare_of_accelerate_alone_leaves_no_state_when_the_data_is_torchs(accelerator: Accelerator) -> None:
    prepared = accelerator.prepare(of_torch())
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
    next(iter(prepared))
    assert not hasattr(prepared.base_dataloader, "state_dict")


class Model(lightning.LightningModule):
    """It saves the loader's state with its own.

    Args:
        loader: what it is trained with.
        stop: the batch after which training ends, as if it had been killed there.
    """

    def __init__(self, loader: hr.DataLoader[Any], stop: int = 0) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.loader, self.stop = loader, stop
        self.keys: list[list[int]] = []
        self.state: dict[str, Any] = {}

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        self.keys.append(keys_of(batch))
        return (self.line(batch["x"] / COUNT) - batch["labels"]).square().mean()

    def on_train_batch_end(self, *arguments: Any) -> None:
        if len(self.keys) == self.stop:
            self.state = through_json(self.loader.state_dict(batches=arguments[-1] + 1))
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(model: Model, max_epochs: int) -> None:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    runner = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=max_epochs, min_epochs=0, **dict.fromkeys(quiet, False)
    )
    runner.fit(model, model.loader)


@pytest.mark.parametrize("trained", [1, 3, 5])
@pytest.mark.parametrize("is_counted", [True, False])
def test_state_after_the_trained_batches_gives_the_rest_when_lightning_is_one_ahead(
    trained: int, is_counted: bool
) -> None:
    """It takes one batch ahead where a loader has no length."""
    data = data_of("headrace").shuffle()
    data = data if is_counted else data.filter(always)
    with loader_of(data) as loader:
        expected = [keys_of(batch) for batch in loader]
    with loader_of(data) as loader:
        model = Model(loader, stop=trained)
        fit(model, 1)
        assert model.keys == expected[:trained]
    with loader_of(data) as loader:
        loader.load_state_dict(model.state)
        again = Model(loader)
        fit(again, 1)
        assert again.keys == expected[trained:]


def always(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] >= 0)
