"""torchtitan builds its loader from a configuration and iterates what it built: ours fits its base class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from builders.loops import flat
from full.frameworks.data import COUNT, assert_made_by_our_workers, data_of, keys_of
from torchtitan.components.dataloader import BaseDataLoader

import headrace as hr
from headrace.integrations import TitanState


class Loader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        regime: str = "headrace"
        num_workers: int = 1
        is_filtered: bool = False

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        data = data_of(config.regime)
        ranks = hr.Ranks(rank=dp_rank, world_size=dp_world_size, compare=False)
        options = {"ranks": ranks} if dp_world_size > 1 else {}
        if config.is_filtered:
            data = data.filter(always).epoch(samples=COUNT)
        self.batches: Any = hr.DataLoader(data, batch_size=local_batch_size, num_workers=config.num_workers, **options)
        self.state = TitanState(self.batches, dp_rank)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.load_state_dict(state_dict)


def always(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] >= 0)


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Builds loaders as torchtitan does. They are closed after the test."""
    with contextlib.ExitStack() as stack:

        def built(rank: int = 0, world: int = 1, batch: int = 4, **config: Any) -> Any:
            ranks = {"dp_world_size": world, "dp_rank": rank, "local_batch_size": batch}
            loader = Loader.Config(**config).build(**ranks, tokenizer=None, seq_len=8, snapshot_every_n_steps=None)
            stack.enter_context(loader.batches)
            return loader

        yield built


@pytest.mark.parametrize("regime", ["torch", "headrace"])
def test_component_runs_our_engine_when_torchtitan_builds_it(regime: str, build: Callable[..., Any]) -> None:
    loader = build(regime=regime)
    assert isinstance(loader, BaseDataLoader)
    batches = list(loader)
    assert flat(map(keys_of, batches)) == list(range(COUNT))
    assert_made_by_our_workers(batches)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("regime", ["torch", "headrace"])
def test_a_checkpoint_of_torchs_has_the_loaders_state(regime: str, tmp_path: Path, build: Callable[..., Any]) -> None:
    before, after = build(regime=regime), build(regime=regime)
    next(iter(before))
    dcp.save({"dataloader": before}, checkpoint_id=tmp_path)
    dcp.load({"dataloader": after}, checkpoint_id=tmp_path)
    assert [keys_of(batch) for batch in after] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_one_state_serves_all_ranks(build: Callable[..., Any]) -> None:
    ranks = [build(rank, 2, 2) for rank in range(2)]
    for loader in ranks:
        next(iter(loader))
    (state,) = {str(loader.state_dict()) for loader in ranks}
    assert state == str(ranks[0].state_dict())
    after = build(0, 1, 4)
    after.load_state_dict(ranks[0].state_dict())
    assert [keys_of(batch) for batch in after] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_state_of_a_rank_is_kept_by_its_name(build: Callable[..., Any]) -> None:
    ranks = [build(rank, 2, 2, is_filtered=True) for rank in range(2)]
    for loader in ranks:
        next(iter(loader))
    whole = {**ranks[0].state_dict(), **ranks[1].state_dict()}
    assert sorted(whole) == ["dp_rank_0", "dp_rank_1"]
    rest = []
    for rank in range(2):
        after = build(rank, 2, 2, is_filtered=True)
        after.load_state_dict(whole)
        rest += flat(map(keys_of, after))
    assert sorted(rest) == list(range(4, COUNT))
    for rank, text in ((0, "rank 0 of 2"), (2, "dp_rank_2")):
        with pytest.raises(hr.StateMismatchError, match=text):
            build(rank, 3, 1, is_filtered=True).load_state_dict(whole)


def test_checkpoint_without_a_loader_state_starts_from_the_beginning(build: Callable[..., Any]) -> None:
    loader = build()
    loader.load_state_dict({})
    assert keys_of(next(iter(loader))) == [0, 1, 2, 3]
