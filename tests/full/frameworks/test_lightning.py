"""Lightning's Trainer takes our loader as it is; where it makes a new one, that is ours with our options."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from full.frameworks.data import COUNT, assert_made_by_our_workers, data_of, keys_of
from full.frameworks.fitting import Model, trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import headrace as hr

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:::pytorch_lightning"),
]
FIVES = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
BOTH = pytest.mark.parametrize("regime", ["torch", "headrace"])


class Predicting(Model):
    def predict_step(self, batch: dict[str, Any], number: int) -> list[int]:
        self.batches.append(batch)
        return keys_of(batch)


class ModelWithLoader(Model):
    """It makes its loader in the hook, where Lightning notes how loaders are made."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.keys: list[Sequence[int]] = []

    def write_on_batch_end(self, *arguments: Any) -> None:
        self.keys.append(list(arguments[3]))


@BOTH
def test_trainer_takes_the_loader_as_it_is_when_it_fits(regime: str) -> None:
    model, runner = Model(), trainer(max_epochs=2)
    with hr.DataLoader(data_of(regime), batch_size=4, shuffle=True, num_workers=2) as loader:
        runner.fit(model, loader)
        assert runner.train_dataloader is loader
        assert loader.regime == regime
    assert_made_by_our_workers(model.batches)
    first, second = ([key for batch in model.batches[n : n + 3] for key in keys_of(batch)] for n in (0, 3))
    assert sorted(first) == sorted(second) == list(range(COUNT))


def test_epochs_are_in_different_orders_when_the_trainer_stops_at_the_last_batch() -> None:
    """It counts batches and never asks for the one after the last, so it is by set_epoch that we learn of the end."""
    model = Model()
    with hr.DataLoader(data_of("headrace"), batch_size=4, shuffle=True, num_workers=1) as loader:
        trainer(max_epochs=2).fit(model, loader)
    with hr.DataLoader(data_of("headrace"), batch_size=4, shuffle=True, num_workers=1) as plain:
        assert [keys_of(b) for b in model.batches] == [keys_of(b) for _ in range(2) for b in plain]


@BOTH
def test_loader_of_a_hook_is_ours_when_the_trainer_asks_for_it(regime: str) -> None:
    with contextlib.ExitStack() as stack:
        make = partial(hr.DataLoader, data_of(regime), batch_size=4, num_workers=1)
        model = ModelWithLoader(lambda: stack.enter_context(make()))
        trainer(max_epochs=2, overfit_batches=1).fit(model)
    assert len(model.batches) == 2
    assert_made_by_our_workers(model.batches)


@BOTH
def test_validation_loader_is_ours_when_the_trainer_validates(regime: str) -> None:
    model = Model()
    with hr.DataLoader(data_of(regime), batch_size=5, num_workers=1) as loader:
        trainer().validate(model, loader, verbose=False)
    assert [keys_of(batch) for batch in model.batches] == FIVES
    assert_made_by_our_workers(model.batches)


@BOTH
def test_loader_that_is_made_again_keeps_our_options_when_overfitting(regime: str) -> None:
    ours = (
        {"seed": 5, "fetch": hr.Fetch(concurrency=3), "memory_budget": "64MiB"}
        if regime == "headrace"
        else {"economic": True}
    )
    model, runner = Model(), trainer(max_epochs=2, overfit_batches=2)
    with hr.DataLoader(data_of(regime), batch_size=4, shuffle=True, num_workers=1, **ours) as loader:  # type: ignore[arg-type]
        runner.fit(model, loader)
        remade: Any = runner.train_dataloader
        assert remade is not loader
    assert type(remade) is hr.DataLoader
    assert {name: getattr(remade, name) for name in ours} == ours
    assert [keys_of(batch) for batch in model.batches] == 2 * [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert_made_by_our_workers(model.batches)
    remade.close()


@BOTH
def test_loader_that_is_made_again_gives_all_samples_when_predicting(regime: str) -> None:
    model = Predicting()
    with hr.DataLoader(data_of(regime), batch_size=5, drop_last=True, num_workers=1) as loader:
        assert trainer().predict(model, loader) == FIVES
    assert_made_by_our_workers(model.batches)


def test_prediction_writer_receives_the_keys() -> None:
    writer = Writer()
    loader = hr.DataLoader(data_of("torch"), batch_size=5, num_workers=2)
    trainer(callbacks=[writer]).predict(Predicting(), loader)
    assert writer.keys == FIVES


class NewLoop:
    """A loop that trains as Lightning's does, and counts epochs under another name."""

    def begin(self, loader: Any) -> Any:
        fetcher: Any = _PrefetchDataFetcher()
        fetcher.setup(CombinedLoader(loader, "max_size_cycle"))
        iter(fetcher)
        return fetcher


@BOTH
def test_state_warns_of_batches_ahead_when_the_loop_counts_epochs_in_another_way(regime: str) -> None:
    with hr.DataLoader(data_of(regime), batch_size=4) as loader:
        fetcher = NewLoop().begin(loader)
        with pytest.warns(RuntimeWarning, match=r"lightning\.pytorch iterates over this loader in a way"):
            loader.state_dict()
        fetcher.reset()
