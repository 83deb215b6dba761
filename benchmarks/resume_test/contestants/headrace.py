"""headrace over tar shards with an index, over an AsyncDataset, and over packed documents."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from resume_test.contestants import SEED, Contestant, Reads, Setting, write_tars

import headrace as hr

assert hr.DataLoader  # torch and the engine are imported now, as by the other libraries: imports are not measured


class Shards(Contestant):
    """Shuffled by the default rule: shards, and windows of their samples."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.loader: hr.DataLoader[Any] = hr.DataLoader(
            self._data(),
            batch_size=setting.batch_size,
            num_workers=setting.num_workers,
            seed=SEED,
            ranks=hr.Ranks(rank=setting.rank, world_size=setting.world),
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
        for (batch,) in self._batches(number):
            yield batch.tolist()

    def _batches(self, number: int) -> Iterator[Any]:
        if not self.is_resumed:
            self.loader.set_epoch(number)
        self.is_resumed = False
        return iter(self.loader)

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

    write = Contestant.write

    def _data(self) -> Any:
        return Numbers(self.setting.samples, self.count).shuffle()


LENGTH = 4  # of a sequence; documents are 1 to 4 times their number


def tokens_of(number: int) -> int:
    return 1 + number * 7 % 4


class Document:
    """The document with a number."""

    def __init__(self, count: Reads) -> None:
        self.count = count

    def __call__(self, number: int) -> dict[str, Any]:
        return {"input_ids": np.full(tokens_of(self.count(number)), number)}


class Packed(Keys):
    """Documents whose lengths are known, as sequences; what is counted are tokens."""

    def _data(self) -> Any:
        lengths = [tokens_of(number) for number in range(self.setting.samples)]
        documents = hr.from_map(range(self.setting.samples)).shuffle().map(Document(self.count))
        return documents.pack(LENGTH, lengths=lengths, pad_value=-1).map(_ids)

    def epoch(self, number: int) -> Iterator[list[int]]:
        for (batch,) in self._batches(number):
            yield batch[batch >= 0].tolist()


class MixedByTokens(Packed):
    """Documents of two sources whose lengths nobody knows, mixed by tokens, filtered, and packed in lanes."""

    def _data(self) -> Any:
        half = self.setting.samples // 2
        halves = {"a": range(half), "b": range(half, 2 * half)}
        sources = {name: hr.from_map(some).shuffle().map(Document(self.count)) for name, some in halves.items()}
        mixed = hr.mix(sources, {"a": 1, "b": 1}, by="tokens").filter(_most)
        return mixed.pack(LENGTH, pad_value=-1).map(_ids).epoch(samples=self.setting.samples // 2)

    def load(self, states: list[Any]) -> None:
        super().load([hr.merge_states(states)])  # of filtered documents each rank has a state of its own


def _ids(sequence: dict[str, Any]) -> tuple[Any]:
    return (sequence["input_ids"],)


def _most(document: dict[str, Any]) -> bool:
    return bool(document["input_ids"][0] % 10 != 3)
