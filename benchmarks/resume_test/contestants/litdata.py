"""LitData: StreamingDataset and StreamingDataLoader over a data set that it has optimized."""

from __future__ import annotations

import os
from pathlib import Path

import litdata
import torch.distributed
from resume_test.contestants import SEED, SHARDS, Contestant, Setting


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


def _same(number: int) -> int:
    return number
