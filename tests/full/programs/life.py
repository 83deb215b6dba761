"""The life of a loader, its iterators and its workers."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from watching import Asking, Note, attempt, program, read, run, unchanged


class Counting(Dataset[Any]):
    """Samples hold the number of calls of this copy."""

    def __init__(self, count: int = 12) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        worker = get_worker_info()
        return index, self.asked, worker.id if worker else -1


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        worker = get_worker_info()
        for k in range(7):
            yield k, self.begun, worker.id if worker else -1


def gone(pids: list[int]) -> bool:
    """True if the processes end soon."""
    for _ in range(2000):
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.01)
    return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@program
def epochs_of_one_loader(loader: Any, note: Note) -> None:
    for data in (Counting(), Stream()):
        read(loader, note, data, 3, epochs=3)
        read(loader, note, data, 3, workers=(2,), epochs=3, persistent_workers=True)
        note(vars(data))


@program
def epochs_that_are_left_early(loader: Any, note: Note) -> None:
    for data in (Counting(), Stream()):
        for workers, persistent in ((0, False), (2, False), (2, True)):
            loading = loader(data, 3, num_workers=workers, persistent_workers=persistent)
            for epoch in range(3):
                note(workers, [batch[0] for _, batch in zip(range(epoch + 1), loading, strict=False)])
            note([batch[0] for batch in loading])


@program
def iterators_beside_each_other(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        loading = loader(Counting(), 3, num_workers=workers, generator=torch.Generator().manual_seed(1), shuffle=True)
        for one, other in zip(loading, loading, strict=True):
            note(workers, one, other)
        nested = [(a[0].tolist(), b[0].tolist()) for a in loading for b in itertools.islice(loading, 2)]
        note(nested)
        first, second = iter(loading), iter(loading)
        note(next(first), next(second), next(first))
        del first
        note(list(second))


@program
def persistent_iterator_is_one(loader: Any, note: Note) -> None:
    loading = loader(Counting(), 3, num_workers=2, persistent_workers=True)
    first = iter(loading)
    note(next(first), next(first))
    second = iter(loading)
    note(first is second, next(second))
    pids = [worker.pid for worker in second._workers]
    note(len(list(second)), attempt(next, second))
    third = iter(loading)
    note(third is first, [worker.pid for worker in third._workers] == pids, len(list(third)))
    del first, second, third, loading
    gc.collect()
    note(gone(pids))


@program
def iterator_at_its_end(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        iterator = iter(loader(Counting(), 5, num_workers=workers))
        for batch in iterator:
            note(batch)
        for _ in range(3):
            note(attempt(next, iterator))
        note(list(iterator), iter(iterator) is iterator)


@program
def lengths(loader: Any, note: Note) -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return 7

    for data in (Counting(), Counting(0), Counting(1), Stream(), Sized()):
        for size in (None, 4, 100):
            for drop_last in (False, True) if size else (False,):
                for workers in (0, 1):
                    loading = loader(data, size, num_workers=workers, drop_last=drop_last)
                    iterator = iter(loading)
                    lengths_of = [attempt(len, each) for each in (loading, iterator)]
                    note(size, drop_last, lengths_of, len(list(iterator)))


@program
def data_set_that_grows(loader: Any, note: Note) -> None:
    data = [1, 2, 3]
    for workers in (0, 1):
        loading = loader(data, 2, num_workers=workers)
        note(len(loading), list(loading))
        data += [4, 5]
        note(len(loading), list(loading))
        for batch in loading:
            note(batch)
            if len(data) < 30 and workers == 0:
                data.append(9)


@program
def attributes_and_changes(loader: Any, note: Note) -> None:
    names = "batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn prefetch_factor generator "
    names += "persistent_workers pin_memory_device in_order multiprocessing_context sampler batch_sampler dataset"
    for options in (
        {},
        {"num_workers": 2},
        {"batch_size": None},
        {"batch_size": 3, "shuffle": True, "drop_last": True},
        {"sampler": [3, 1]},
        {"batch_sampler": [[0, 1], [2]]},
        {"num_workers": 2, "collate_fn": list, "pin_memory": True, "timeout": 5, "worker_init_fn": print}
        | {"prefetch_factor": 4, "persistent_workers": True, "pin_memory_device": "cuda", "in_order": False},
    ):
        loading = loader(range(8), **options)
        for name in names.split():
            value = getattr(loading, name)
            note(name, value, attempt(setattr, loading, name, value))
        note(loading._auto_collation, loading._is_multiprocessing if hasattr(loading, "_is_multiprocessing") else None)
        note(attempt(setattr, loading, "of_the_users", 5), loading.of_the_users)
        note(attempt(getattr, loading, "none_such"))


@program
def options_that_are_changed_between_epochs(loader: Any, note: Note) -> None:
    loading = loader(Counting(), 3)
    note([batch[0].tolist() for batch in loading])
    loading.num_workers, loading.prefetch_factor = 2, 2
    note(list(loading))
    loading.collate_fn = lambda samples: [sample[0] for sample in samples]
    note(list(loading))
    loading.num_workers, loading.prefetch_factor = 0, None
    note(list(loading))


@program
def data_set_that_changes_between_epochs(loader: Any, note: Note) -> None:
    for workers, persistent in ((0, False), (1, False), (1, True)):
        data = Counting(4)
        loading = loader(data, 2, num_workers=workers, persistent_workers=persistent)
        for _ in range(3):
            note(list(loading))
            data.asked += 100


@program
def copies_and_pickles(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        loading = loader(Counting(), 3, num_workers=workers, shuffle=True)
        loading.note = "of the user's"
        for made in (copy.copy(loading), copy.deepcopy(loading), pickle.loads(pickle.dumps(loading))):
            note(type(made) is type(loading), made.note, made.num_workers, made.batch_size, len(made))
            for batch in made:
                note(batch)
        iterator = iter(loading)
        note(attempt(pickle.dumps, iterator)[:40])
        del iterator


@program
def classes_and_types(loader: Any, note: Note) -> None:
    loading = loader(range(3))
    note(isinstance(loading, torch.utils.data.DataLoader), issubclass(loader, torch.utils.data.DataLoader))
    note(loader[int] is not None, type(loading).__name__, loader.__name__, bool(loading), loading == loading)
    note(isinstance({loading: 1}, dict), hash(loading) == hash(loading))
    note(attempt(next, loading), attempt(lambda: loading[0]), 2 in [int(batch) for batch in loading])
    note([(a.item(), b.item()) for a, b in zip(loading, loading, strict=True)], list(enumerate(loading)))
    note(list(map(int, loading)), max(loading), list(itertools.chain(loading, loading)))
    note(list(itertools.islice(itertools.cycle(loading), 5)), *loading)


@program
def empty_data_sets(loader: Any, note: Note) -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    for data in ([], Nothing(), range(0)):
        for size in (1, None):
            read(loader, note, data, size, epochs=2)
    for batches in ([], [[]]):
        read(loader, note, [1], batch_sampler=batches)


@program
def loader_that_makes_a_loader(loader: Any, note: Note) -> None:
    def within(_: Any, index: int) -> Any:
        return [batch.tolist() for batch in loader(range(index, index + 4), 2)]

    read(loader, note, Asking(within, count=3), workers=(0, 1), collate_fn=unchanged)


if __name__ == "__main__":
    run()
