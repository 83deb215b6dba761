"""torchtitan builds its loader from a configuration and iterates what it built: ours fits behind its base class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from frameworks.whence import COUNT, assert_made_by_our_workers, data_of, keys_of
from torchtitan.components.dataloader import BaseDataLoader

import headrace as hr


class Loader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        regime: str = "headrace"
        num_workers: int = 1

    def __init__(self, config: Config, *, local_batch_size: int, **_: Any) -> None:
        self.batches: Any = hr.DataLoader(
            data_of(config.regime), batch_size=local_batch_size, num_workers=config.num_workers
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


@pytest.mark.parametrize("regime", ["torch", "headrace"])
def test_component_runs_our_engine_when_torchtitan_builds_it(regime: str) -> None:
    built: Any = Loader.Config(regime=regime).build(
        dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=8, local_batch_size=4, snapshot_every_n_steps=None
    )
    assert isinstance(built, BaseDataLoader)
    batches = list(built)
    assert [key for batch in batches for key in keys_of(batch)] == list(range(COUNT))
    assert_made_by_our_workers(batches)
    built.batches.close()
