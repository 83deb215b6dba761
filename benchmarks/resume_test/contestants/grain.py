"""Grain's DataLoader, and its iterator for a changing number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from grain.experimental import ElasticIterator, FirstFitPackIterDataset
from resume_test.contestants import SEED, Contestant, Reads, Setting


class Numbers(grain.sources.RandomAccessDataSource):
    """Sample n is the number n."""

    def __init__(self, samples: int, count: Reads) -> None:
        self.samples, self.count = samples, count

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return int(self.count(index))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.samples})"  # it is compared with that in the state


class Loader(Contestant):
    """grain.DataLoader with an IndexSampler: global shuffle, batches made in workers."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.data = Numbers(setting.samples, self.count)
        self.iterator: Any = None
        self.at = 0  # the epoch that the iterator is of; Grain has iterators, the trainer counts epochs
        self.resumed: dict[str, Any] | None = None

    def _iterator(self, number: int) -> Any:
        setting = self.setting
        sampler = grain.samplers.IndexSampler(
            num_records=setting.samples,
            num_epochs=1,
            shard_options=grain.sharding.ShardOptions(setting.rank, setting.world),
            shuffle=True,
            seed=SEED + number,
        )
        loader = grain.DataLoader(
            data_source=self.data,
            sampler=sampler,
            operations=[grain.transforms.Batch(setting.batch_size)],
            worker_count=setting.num_workers,
        )
        return iter(loader)

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.iterator, self.at = self._iterator(number), number
        if self.resumed is not None and self.resumed["epoch"] == number:
            self._set_state(self.resumed["iterator"])
        self.resumed = None
        yield from map(self._numbers, self.iterator)

    def _numbers(self, batch: Any) -> list[int]:
        return batch.tolist()

    def state(self) -> Any:
        state = self.iterator.get_state()
        return {"epoch": self.at, "iterator": state.decode() if isinstance(state, bytes) else state}

    def load(self, states: list[Any]) -> None:
        self.resumed = self.state_of_this_rank(states)

    def _set_state(self, state: Any) -> None:
        self.iterator.set_state(state.encode())  # bytes of JSON


class Elastic(Loader):
    """grain.experimental.ElasticIterator: every rank has the same state."""

    def _iterator(self, number: int) -> Any:
        setting = self.setting
        data = grain.MapDataset.source(self.data).shuffle(seed=SEED + number)
        workers = grain.multiprocessing.MultiprocessingOptions(setting.num_workers) if setting.num_workers else None
        shard = grain.sharding.ShardOptions(setting.rank, setting.world)
        return iter(ElasticIterator(data, setting.global_batch_size, shard, multiprocessing_options=workers))

    def _set_state(self, state: Any) -> None:
        self.iterator.set_state(state)


class Documents(Numbers):
    """Document n is 1 to 4 times the token n."""

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        number = super().__getitem__(index)
        return {"ids": np.full(1 + number * 7 % 4, number)}


class Packed(Elastic):
    """FirstFitPackIterDataset: each worker packs documents of its own; what is counted are tokens."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.data = Documents(setting.samples, self.count)

    def _iterator(self, number: int) -> Any:
        setting = self.setting
        documents = grain.MapDataset.source(self.data).shuffle(seed=SEED + number)[setting.rank :: setting.world]
        packed = FirstFitPackIterDataset(documents.to_iter_dataset(), length_struct={"ids": 4}, num_packing_bins=8)
        batches = packed.batch(setting.batch_size)
        if setting.num_workers:
            batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(setting.num_workers))
        return iter(batches)

    def _numbers(self, batch: Any) -> list[int]:
        return batch["ids"][batch["ids_segment_ids"] > 0].tolist()
