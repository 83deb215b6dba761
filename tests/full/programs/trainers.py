"""Trainers that remake loaders, group batches and loop over several loaders."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)
from watching import Images, Note, attempt, program, run, seed_worker


class Sharded(BatchSampler):
    """The share of one process of each batch."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            size = -(-len(batch) // self.world)
            yield batch[self.rank * size : (self.rank + 1) * size]


def made_again(loader: Any, loading: Any, rank: int, **more: Any) -> Any:
    """As accelerate does: a loader of the same options, with another batch sampler."""
    kept = "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor"
    options = {name: getattr(loading, name) for name in (*kept.split(), "persistent_workers", "pin_memory_device")}
    return loader(loading.dataset, batch_sampler=Sharded(loading.batch_sampler, rank, 2), **options, **more)


@program
def loader_made_again_of_anothers_options(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        loading = loader(Images(), 4, True, num_workers=workers, generator=torch.Generator().manual_seed(3))
        for rank in range(2):
            loading.generator.manual_seed(3)
            again = made_again(loader, loading, rank, in_order=loading.in_order)
            note(len(again), again.batch_size)
            for batch in again:
                note(rank, batch)


class Columns(Dataset[Any]):
    """As tables of transformers' users: columns that a collator pads."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": list(range(1, 2 + index % 4)), "labels": index, "text": f"row {index}"}


class Collator:
    def __init__(self, padding: int, keep: tuple[str, ...]) -> None:
        self.padding, self.keep = padding, keep

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [{key: row[key] for key in self.keep} for row in rows]
        longest = max(len(row["input_ids"]) for row in rows)
        ids = [row["input_ids"] + [self.padding] * (longest - len(row["input_ids"])) for row in rows]
        mask = [[int(k < len(row["input_ids"])) for k in range(longest)] for row in rows]
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


class LongestFirst(Sampler[int]):
    def __init__(self, lengths: list[int], generator: torch.Generator) -> None:
        self.lengths, self.generator = lengths, generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths), generator=self.generator).tolist()
        return iter(sorted(order, key=lambda k: -self.lengths[k]))


@program
def padded_columns_as_a_trainer_loads_them(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        drawn = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        sampler = LongestFirst([1 + k % 4 for k in range(9)], drawn)
        options = {"num_workers": workers, "collate_fn": Collator(0, ("input_ids", "labels")), "sampler": sampler}
        if workers:
            options.update(prefetch_factor=2, persistent_workers=True, worker_init_fn=seed_worker)
        loading = loader(Columns(), 4, **options)
        steps = 0
        while steps < 7:
            for batch in loading:
                note(steps, batch)
                steps += 1
                if steps == 7:
                    break
        skipped = list(loading)[1:]
        note(skipped)


class ToIterable(IterableDataset[Any]):
    """As detectron2: a map-style data set and a sampler as a stream, each worker its share."""

    def __init__(self, data: Any, sampler: Any) -> None:
        self.data, self.sampler = data, sampler

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number, index in enumerate(self.sampler):
            if number % step == first:
                yield self.data[index]


class ByAspect(IterableDataset[Any]):
    """Groups what a loader gives one by one into batches of one orientation."""

    def __init__(self, source: Any, size: int) -> None:
        self.source, self.size = source, size
        self.buckets: list[list[Any]] = [[], []]

    def __iter__(self) -> Iterator[Any]:
        for sample in self.source:
            bucket = self.buckets[int(sample["width"] > sample["height"])]
            bucket.append(sample)
            if len(bucket) == self.size:
                yield bucket[:]
                bucket.clear()


def first_of(batch: list[Any]) -> Any:
    return batch[0]


@program
def batches_of_one_orientation_as_detectron_makes(loader: Any, note: Note) -> None:
    rows = [{"width": 5 + k % 3, "height": 6, "image": torch.full((2, 2), float(k)), "name": f"{k}"} for k in range(14)]
    for workers in (0, 2):
        source = loader(
            ToIterable(rows, SequentialSampler(rows)),
            num_workers=workers,
            batch_size=2,
            drop_last=False,
            collate_fn=lambda batch: batch,
        )
        flat = (sample for batch in source for sample in batch)
        for batch in ByAspect(flat, 3):
            note(workers, batch)
        single = loader(ToIterable(rows, range(14)), None, num_workers=workers, collate_fn=lambda sample: sample)
        for batch in ByAspect(single, 3):
            note(workers, batch)
        note(
            [
                first_of(batch)
                for batch in loader(rows, 1, num_workers=workers, collate_fn=first_of)
                if isinstance(batch, list)
            ]
        )


@program
def loader_of_delegated_parts_as_fastai_makes(loader: Any, note: Note) -> None:
    """The loader's functions are methods of another object, which is the data set's, too; the stream is made by it."""

    class Asked(IterableDataset[Any]):
        def __init__(self, owner: Any) -> None:
            self.owner = owner

        def __iter__(self) -> Iterator[Any]:
            info = torch.utils.data.get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            numbers = self.owner.order
            batches = [numbers[at : at + 3] for at in range(0, len(numbers), 3)]
            for batch in batches[first::step]:
                yield self.owner.make(batch)

    class Owner:
        def __init__(self, items: list[Any], workers: int) -> None:
            self.items, self.workers = items, workers
            self.fake = loader(Asked(self), None, num_workers=workers, worker_init_fn=self.begin)
            self.begun = False

        def begin(self, worker: int) -> None:
            self.begun = True

        def make(self, batch: list[int]) -> Any:
            return default_collate([self.items[k] for k in batch]), self.begun

        def __iter__(self) -> Iterator[Any]:
            self.order = torch.randperm(len(self.items)).tolist()
            for batch in self.fake:
                yield self.after(batch)

        def after(self, batch: Any) -> Any:
            return batch

        def __getstate__(self) -> Any:
            return {key: value for key, value in vars(self).items() if key != "fake"}

    for workers in (0, 2):
        owner = Owner([torch.tensor([k, k * 2]) for k in range(8)], workers)
        for epoch in range(2):
            for batch in owner:
                note(workers, epoch, batch)


@program
def loader_read_by_a_thread_as_monai_does(loader: Any, note: Note) -> None:
    class Buffered(loader):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            held: queue.Queue[Any] = queue.Queue(2)
            done = object()

            def read() -> None:
                for batch in super(Buffered, self).__iter__():
                    held.put(batch)
                held.put(done)

            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            try:
                while (batch := held.get()) is not done:
                    yield batch
            finally:
                thread.join()

    for workers in (0, 2):
        loading = Buffered(Images(), 3, num_workers=workers)
        for epoch in range(2):
            for batch in loading:
                note(workers, epoch, batch)


@program
def class_that_says_its_options_again(loader: Any, note: Note) -> None:
    """Positional arguments, defaults, other constructors, and copies with other options."""

    class Named(loader):  # type: ignore[misc]
        kind = "named"

        def __init__(self, name: str, *args: Any, **options: Any) -> None:
            self.name = name
            super().__init__(*args, **options)

        @classmethod
        def small(cls, data: Any) -> Any:
            return cls("small", data, 2)

        @property
        def total(self) -> int:
            return len(self) * (self.batch_size or 1)

        def __iter__(self) -> Any:
            self.last = super().__iter__()
            return self.last

    class Derived(Named):
        def __len__(self) -> int:
            return 2

    for kind in (Named, Derived):
        loading = kind("first", range(7), 3, False, None, None, 2)
        note(loading.name, loading.total, list(loading), len(loading.last), kind.small(range(3)).total)
        other = copy.copy(loading)
        note(other.name, list(other), type(other) is kind)
        note(attempt(lambda each=loading: setattr(each, "batch_size", 5)))
        note(attempt(lambda each=loading: setattr(each, "name", "second")), loading.name)


@program
def several_loaders_in_turn(loader: Any, note: Note) -> None:
    """As combined loaders do: the longest, the shortest, and in turn."""
    for workers in (0, 2):
        one, other = loader(range(7), 2, num_workers=workers), loader(Images(4), 2, num_workers=workers)
        for pair in zip(one, other, strict=False):
            note("shortest", pair)
        iterators = [iter(one), iter(other)]
        ended: set[int] = set()
        while len(ended) < 2:
            for number, iterator in enumerate(iterators):
                batch = next(iterator, None)
                if batch is None:
                    ended.add(number)
                    iterators[number] = iter((one, other)[number])
                    batch = next(iterators[number])
                note("longest", number, batch)
        for batch in loader(
            ConcatDataset([one.dataset, range(3)]), 4, sampler=RandomSampler(range(10)), num_workers=workers
        ):
            note("joined", batch)


if __name__ == "__main__":
    run()
