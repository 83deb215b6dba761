"""WebDataset, which has no state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset as wds
from resume_test.contestants import SEED, SHARDS, Contestant, NoStateError, Setting, write_tars


class Shards(Contestant):
    """WebLoader over shuffled shards, with a buffer."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        urls = sorted(str(path) for path in Path(setting.folder).glob("*.tar"))
        data = wds.WebDataset(
            urls, shardshuffle=SHARDS, seed=SEED, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker
        )
        self.data = data.shuffle(300, seed=SEED).decode().to_tuple("cls").map(self.count)
        batched = self.data.batched(setting.batch_size)
        self.loader = wds.WebLoader(batched, batch_size=None, num_workers=setting.num_workers)

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        write_tars(folder, samples)

    def epoch(self, number: int) -> Iterator[list[int]]:
        for (numbers,) in self.loader:
            yield [int(n) for n in numbers]

    def state(self) -> Any:
        raise NoStateError
