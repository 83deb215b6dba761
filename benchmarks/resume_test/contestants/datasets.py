"""Hugging Face datasets, streamed from Parquet files, in torchdata's StatefulDataLoader, after its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from datasets.distributed import split_dataset_by_node
from resume_test.contestants import SEED, SHARDS, Contestant, Setting
from torchdata.stateful_dataloader import StatefulDataLoader


class Buffered(Contestant):
    """Shuffled: shards, and samples in a buffer."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        files = sorted(str(path) for path in Path(setting.folder).glob("*.parquet"))
        data = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=f"{setting.folder}/cache"
        )
        data = self._shuffled(data).map(self.count)
        self.data = split_dataset_by_node(data, setting.rank, setting.world)
        self.loader = StatefulDataLoader(self.data, batch_size=setting.batch_size, num_workers=setting.num_workers)

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        for shard, numbers in enumerate(np.array_split(np.arange(samples), SHARDS)):
            pyarrow.parquet.write_table(pa.table({"number": numbers}), folder / f"{shard:02d}.parquet")

    def _shuffled(self, data: Any) -> Any:
        return data.shuffle(seed=SEED, buffer_size=300)

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.data.set_epoch(number)
        for batch in self.loader:
            yield batch["number"].tolist()


class InOrder(Buffered):
    """Not shuffled, so that no buffer has to be refilled."""

    def _shuffled(self, data: Any) -> Any:
        return data
