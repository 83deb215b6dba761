"""headrace over tar shards with an index, and over an AsyncDataset."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.contestants import SEED, Contestant, Reads, Setting
from peers.shards import write_tars

import headrace as hr


class Shards(Contestant):
    """Shuffled by the default rule: shards, and windows of their samples."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.loader: hr.DataLoader[Any] = hr.DataLoader(
            self._data(),
            batch_size=setting.batch_size,
            num_workers=setting.num_workers,
            seed=SEED,
            rank=setting.rank,
            world_size=setting.world,
        )
        self.is_resumed = False

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        urls = write_tars(folder, samples)
        command = [sys.executable, "-m", "headrace.cli", "index", *urls, "--output", str(folder / "train.hri")]
        subprocess.run(command, check=True, capture_output=True)

    def _data(self) -> Any:
        folder = Path(self.setting.folder)
        urls = sorted(str(path) for path in folder.glob("*.tar"))
        data = hr.stream(urls, index=str(folder / "train.hri"))
        return data.shuffle().decode().to_tuple("cls").map(self.count)

    def epoch(self, number: int) -> Iterator[list[int]]:
        if not self.is_resumed:
            self.loader.set_epoch(number)
        self.is_resumed = False
        for (batch,) in self.loader:
            yield batch.tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(states[0])  # every rank has the same
        self.is_resumed = True


class Numbers(hr.AsyncDataset):
    """Sample n is the number n."""

    def __init__(self, samples: int, count: Reads) -> None:
        self.samples, self.count = samples, count

    def __len__(self) -> int:
        return self.samples

    async def aget(self, key: int) -> tuple[int]:
        return (self.count(key),)


class Keys(Shards):
    """Shuffled as a whole."""

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        """Nothing lies on a disk."""

    def _data(self) -> Any:
        return Numbers(self.setting.samples, self.count).shuffle()
