"""LitData: StreamingDataset and StreamingDataLoader over a data set that it has optimized."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
import torch.distributed
from full.peers.contestants import SEED, SHARDS, Contestant, Setting


class Streaming(Contestant):
    """Shuffled: chunks, and samples within a chunk."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if setting.world > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        data = litdata.StreamingDataset(
            setting.folder,
            cache_dir=f"{setting.folder}.cache",
            shuffle=True,
            seed=SEED,
            transform=self.count,
            drop_last=False,
        )
        self.loader = litdata.StreamingDataLoader(data, batch_size=setting.batch_size, num_workers=setting.num_workers)

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        os.environ["DATA_OPTIMIZER_NUM_WORKERS"] = "1"
        litdata.optimize(_same, list(range(samples)), str(folder), num_workers=1, chunk_size=-(-samples // SHARDS))

    def epoch(self, number: int) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch.tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(self.state_of_this_rank(states))


def _same(number: int) -> int:
    return number
