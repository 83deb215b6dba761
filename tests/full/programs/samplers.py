"""Samplers, and torch's own wrappers of data sets: which samples come, in which order, and what was drawn for it."""

from __future__ import annotations

import itertools
import math
import random
from collections import UserList, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from watching import Note, attempt, program, read, run, share, tried, unchanged


class Augmented(Dataset[Any]):
    """Draws from all three generators for each sample."""

    def __init__(self, count: int = 13) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@program
def shuffled_epochs_with_random_numbers(loader: Any, note: Note) -> None:
    read(loader, note, Augmented(), 4, True, workers=(0, 1, 2), epochs=2)
    read(loader, note, Augmented(), 4, True, workers=(1, 2), epochs=2, persistent_workers=True)


@program
def shuffled_epochs_with_a_generator(loader: Any, note: Note) -> None:
    given = generator()
    for workers in (0, 2):
        read(loader, note, Augmented(), 4, True, workers=(workers,), epochs=2, generator=given)
        note(torch.rand(1, generator=given).item())


@program
def order_that_is_not_kept(loader: Any, note: Note) -> None:
    loading = loader(Augmented(), 4, True, num_workers=2, in_order=False, generator=generator())
    for _ in range(2):
        note(sorted(index for batch in loading for index in batch[0].tolist()))
    read(loader, note, Augmented(), 4, workers=(0, 1), in_order=False)


class Drawing(Sampler[int]):
    """Draws each index from the global generator when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(13):
            yield int(torch.randint(13, ()))


@program
def random_numbers_of_epochs_that_are_left_early(loader: Any, note: Note) -> None:
    """Requests to workers before the break have advanced the generators."""
    for workers, persistent in ((0, False), (2, False), (2, True)):
        for options in ({"shuffle": True}, {"sampler": Drawing()}, {"shuffle": True, "generator": generator()}):
            loading = loader(Augmented(), 3, num_workers=workers, persistent_workers=persistent, **options)
            for epoch in range(3):
                for number, batch in enumerate(loading):
                    note(epoch, batch, torch.rand(2), np.random.rand())  # noqa: NPY002
                    if number == 2:
                        break
                note(random.random(), loading.generator and torch.rand(1, generator=loading.generator))


@program
def samplers_of_torch(loader: Any, note: Note) -> None:
    data = Augmented()
    for workers in (0, 2):
        samplers = [
            SequentialSampler(data),
            RandomSampler(data),
            RandomSampler(data, replacement=True, num_samples=40, generator=generator()),
            RandomSampler(data, num_samples=30, generator=generator()),
            SubsetRandomSampler([1, 5, 9], generator()),
            WeightedRandomSampler([0.1, 0.9, 0.0, 0.5], 9, generator=generator()),
            WeightedRandomSampler([0.1, 0.9, 0.3, 0.5], 3, replacement=False),
        ]
        for sampler in samplers:
            loading = loader(data, 4, sampler=sampler, num_workers=workers)
            note(type(sampler).__name__, len(loading), loading.sampler is sampler)
            read(loader, note, data, 4, workers=(workers,), epochs=2, sampler=sampler)


@program
def ranks(loader: Any, note: Note) -> None:
    data = Augmented()
    for rank in range(2):
        for drop_last in (False, True):
            sampler = DistributedSampler(data, 2, rank, shuffle=True, seed=3, drop_last=drop_last)
            loading = loader(data, 3, sampler=sampler, num_workers=2, drop_last=drop_last)
            for epoch in (0, 1, 5):
                sampler.set_epoch(epoch)
                for batch in loading:
                    note(rank, epoch, batch)


class ByLength(Sampler[list[int]]):
    """Batches of samples of one length, a new order in each epoch; without torch's base in the constructor."""

    def __init__(self, lengths: list[int], size: int) -> None:
        self.lengths, self.size, self.epoch = lengths, size, 0

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        order = sorted(range(len(self.lengths)), key=lambda k: (self.lengths[k], (k * self.epoch) % 7))
        batches = [order[at : at + self.size] for at in range(0, len(order), self.size)]
        random.shuffle(batches)
        yield from batches


class OldSequence:
    """Is iterated by asking for 0, 1, 2 ... until that is an IndexError."""

    def __getitem__(self, index: int) -> int:
        return [4, 2][index]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(5).tolist()


@program
def samplers_of_ones_own(loader: Any, note: Note) -> None:
    data = Augmented()
    for workers in (0, 2):
        for batches in (ByLength([k % 4 for k in range(13)], 3), BatchSampler(RandomSampler(data), 5, drop_last=True)):
            read(loader, note, data, workers=(workers,), epochs=2, batch_sampler=batches)
        for iterable in ([3, 1, 1], (2, 0), {7: "x", 8: "y"}, OldSequence(), (k for k in (3, 1, 4))):
            read(loader, note, data, 2, workers=(workers,), epochs=2, sampler=iterable)
        loading = loader(data, 2, sampler=Endless(), num_workers=workers)
        iterator = iter(loading)
        note(attempt(len, loading), attempt(len, iterator))
        note([next(iterator)[0] for _ in range(6)])
        del iterator


@program
def keys_of_every_type(loader: Any, note: Note) -> None:
    class Named(Dataset[Any]):
        def __getitem__(self, key: Any) -> Any:
            return key

    keys = ["a", ("b", 1), 2.5, None, np.int64(3), b"x", frozenset({1}), slice(1, 2), [1, 2], {"a": 1}]
    for size in (None, 2):
        read(loader, note, Named(), size, sampler=keys, collate_fn=unchanged)
    read(loader, note, Named(), batch_sampler=[(1, 2), [3], (), range(2)], collate_fn=unchanged)


class Two(NamedTuple):
    first: Any
    second: Any


class Bulk(Augmented):
    def __init__(self, give: Any) -> None:
        super().__init__()
        self.give = give

    def __getitems__(self, indices: list[int]) -> Any:
        return self.give(indices)


@program
def whole_batches_at_once(loader: Any, note: Note) -> None:
    given: list[Any] = [
        lambda ks: [k * 10 for k in ks],
        lambda ks: tuple(ks),
        lambda ks: {"ks": ks},
        lambda ks: torch.tensor(ks),
        lambda ks: np.array(ks),
        lambda ks: (k for k in ks) if get_worker_info() is None else iter(ks),
        lambda ks: "text",
        lambda ks: None,
        lambda ks: [],
        lambda ks: {k: k for k in ks},
        lambda ks: torch.tensor(ks).unsqueeze(1).expand(-1, 3000),
        lambda ks: np.array([(k, k) for k in ks], dtype=[("a", "i4"), ("b", "f4")]),
        lambda ks: (torch.tensor(ks), torch.tensor(ks) + 1),
        lambda ks: Two(np.array(ks), [str(k) for k in ks]),
        lambda ks: [torch.full((3000,), k) for k in ks],
        lambda ks: [ks, ks],
        lambda ks: UserList(ks),
        lambda ks: deque(ks),
        lambda ks: range(ks[0], ks[-1] + 1),
        lambda ks: bytes(ks),
        lambda ks: sum(ks),
        lambda ks: [np.full(2000, k, np.float32) for k in ks for _ in range(2)],
        lambda ks: ks.pop() and ks,
    ]
    refusing = Augmented()
    refusing.__getitems__ = None  # type: ignore[attr-defined]
    note(*loader(refusing, 4))
    for number, give in enumerate(given):
        for collate in (None, lambda batch: (type(batch).__name__, list(batch) if batch is not None else None)):
            note(number)
            read(loader, note, Bulk(give), 4, collate_fn=collate)


# Wrappers


class Part(IterableDataset[Any]):
    """Each worker its share."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[Any]:
        return ((k, torch.rand(1).item()) for k in share(range(self.start, self.stop)))


class Uneven(IterableDataset[Any]):
    """The first worker has fewer samples; the init function changes their number."""

    more = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(range(4 if worker is None or worker.id else 1 + self.more))


class Sized(Part):
    def __len__(self) -> int:
        return self.stop - self.start


@program
def wrappers_of_torch(loader: Any, note: Note) -> None:
    data = Augmented()
    wrapped: list[Any] = [
        Subset(data, [7, 7, 1, -1]),
        Subset(Subset(data, range(4, 10)), [0, 5]),
        ConcatDataset([data, Augmented(3)]),
        data + Augmented(2),
        StackDataset(a=data, b=Augmented()),
        StackDataset(data, TensorDataset(torch.arange(13))),
        *random_split(data, [5, 8], generator()),
        *random_split(data, [0.5, 0.5]),
    ]
    for part in wrapped:
        note(type(part).__name__, len(part), len(loader(part, 3)))
        read(loader, note, part, 3)


@program
def streams(loader: Any, note: Note) -> None:
    made: list[Any] = [Part(0, 11), Sized(0, 11), ChainDataset([Sized(0, 3), Sized(10, 14)]), Sized(0, 3) + Sized(5, 9)]
    for data in made:
        for size, drop_last in ((3, False), (3, True), (None, False)):
            loading = loader(data, size, drop_last=drop_last)
            note(type(data).__name__, size, attempt(len, loading))
            read(loader, note, data, size, workers=(0, 2, 3), drop_last=drop_last)


@program
def streams_of_workers_that_end_one_before_the_other(loader: Any, note: Note) -> None:
    def more(worker: int) -> None:
        get_worker_info().dataset.more = worker + 1

    for begin in (None, more):
        for size, persistent in ((None, False), (2, True)):
            options = {"persistent_workers": persistent, "worker_init_fn": begin}
            read(loader, note, Uneven(), size, workers=(3,), epochs=2, **options)


@program
def streams_that_give_what_they_should_not(loader: Any, note: Note) -> None:
    class OnlyIter:
        """Not a subclass of IterableDataset, so taken for a map."""

        def __iter__(self) -> Iterator[int]:
            return iter((1, 2))

    class NoIterator(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return 5

    class Itself(IterableDataset[Any]):
        """Is its own iterator."""

        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at > 5:
                raise StopIteration
            return self.at

    for workers in (0, 2):
        note(list(tried(loader(NoIterator(), 2, num_workers=workers), 1)))
    read(loader, note, Itself(), 2)
    note(attempt(lambda: next(iter(loader(OnlyIter())))), list(loader(OnlyIter(), batch_sampler=[])))


@program
def streams_and_when_they_are_read(loader: Any, note: Note) -> None:
    seen: list[Any] = []

    class Noting(IterableDataset[Any]):
        """Endless."""

        def __iter__(self) -> Iterator[Any]:
            seen.append("iterated")
            return map(self.read, itertools.count())

        def read(self, k: int) -> int:
            seen.append(k)
            return k

    loading = loader(Noting(), 2)
    note(seen)
    for batch in itertools.islice(loading, 3):
        note(seen, batch)
    note(list(itertools.islice(loader(Noting(), 2, num_workers=2), 4)))
    note(sorted(k for k, _ in loader(Part(0, 11), None, num_workers=2, in_order=False)))


if __name__ == "__main__":
    run()
