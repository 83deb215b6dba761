"""Loaders as libraries subclass, wrap, remake and combine them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import BatchSampler, default_collate
from watching import Images, Note, attempt, program, run, seed_worker


class Repeating:
    """A batch sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


# As timm keeps its workers over epochs


def of_many_epochs(base: Any) -> Any:
    class ManyEpochs(base):  # type: ignore[misc]
        """One iterator for all epochs; the base's check of attributes is switched off for a moment."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._DataLoader__initialized = False
            if self.batch_sampler is None:
                self.sampler = Repeating(self.sampler)
            else:
                self.batch_sampler = Repeating(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            repeated = self.sampler if self.batch_sampler is None else self.batch_sampler
            return len(repeated.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return ManyEpochs


@program
def workers_kept_over_epochs_as_timm_does(loader: Any, note: Note) -> None:
    made = of_many_epochs(loader)
    for workers in (0, 2):
        for options in ({"batch_size": 4, "shuffle": True}, {"batch_size": None}, {"batch_size": 4, "drop_last": True}):
            loading = made(Images(), num_workers=workers, persistent_workers=workers > 0, **options)
            note(len(loading), type(loading).__name__, [list(loading) for _ in range(3)])


# As Ultralytics does


def endless(base: Any) -> Any:
    class Endless(base):  # type: ignore[misc]
        """Its workers are used again in each epoch."""

        def __init__(self, *args: Any, **options: Any) -> None:
            if options.get("num_workers", 0) == 0:
                options.pop("prefetch_factor", None)
            super().__init__(*args, **options)
            object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def __del__(self) -> None:
            try:
                if not hasattr(self.iterator, "_workers"):
                    return
                for worker in self.iterator._workers:
                    if worker.is_alive():
                        worker.terminate()
                self.iterator._shutdown_workers()
            except Exception:
                pass

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    return Endless


@program
def endless_loader_as_ultralytics_makes(loader: Any, note: Note) -> None:
    made = endless(loader)
    for workers in (0, 2):
        data = Images()
        options = {"prefetch_factor": 4 if workers else None, "sampler": None, "worker_init_fn": seed_worker}
        options |= {"collate_fn": default_collate, "generator": torch.Generator().manual_seed(6148914691236517205)}
        loading = made(dataset=data, batch_size=4, shuffle=True, num_workers=workers, **options)
        note(len(loading), loading.batch_size, loading.num_workers)
        for epoch in range(3):
            if epoch == 2:
                data.transform = torch.neg  # as where mosaics are closed
                loading.reset()
            note(list(loading))
        del loading


# As PyTorch Geometric does


class Graph(SimpleNamespace):
    """Tensors of a graph by their names."""


class Collater:
    def __init__(self, dataset: Any, follow: Any = None, exclude: Any = None) -> None:
        self.dataset, self.follow, self.exclude = dataset, follow or [], exclude or []

    def __call__(self, graphs: list[Any]) -> Any:
        first = graphs[0]
        if isinstance(first, Graph):
            return self.joined(graphs)
        if isinstance(first, tuple):
            return type(first)(self(list(parts)) for parts in zip(*graphs, strict=True))
        return default_collate(graphs)

    def joined(self, graphs: list[Graph]) -> Graph:
        parts: dict[str, Any] = {"ptr": torch.tensor([0] + [len(graph.x) for graph in graphs]).cumsum(0)}
        for key in sorted(vars(graphs[0])):
            if key not in self.exclude:
                values = [getattr(graph, key) for graph in graphs]
                if key == "edges":
                    values = [v + at for v, at in zip(values, parts["ptr"].tolist(), strict=False)]
                parts[key] = torch.cat(values, 1 if key == "edges" else 0) if torch.is_tensor(values[0]) else values
            if key in self.follow:
                parts[f"{key}_batch"] = torch.repeat_interleave(torch.tensor([len(v) for v in values]))
        return Graph(**parts)


def of_graphs(base: Any) -> Any:
    class GraphLoader(base):  # type: ignore[misc]
        def __init__(self, dataset: Any, *args: Any, follow: Any = None, exclude: Any = None, **options: Any) -> None:
            options.pop("collate_fn", None)
            self.follow, self.exclude = follow, exclude  # before the base's constructor
            super().__init__(dataset, *args, collate_fn=Collater(dataset, follow, exclude), **options)

    return GraphLoader


def graph_of(k: int) -> Graph:
    nodes = 2 + k % 3
    x, edges = torch.full((nodes, 2), float(k)), torch.tensor([[0, 1], [1, 0]])
    return Graph(x=x, edges=edges, name=f"graph {k}", y=torch.tensor([k]))


@program
def graphs_as_geometric_loads_them(loader: Any, note: Note) -> None:
    made = of_graphs(loader)
    for workers in (0, 2):
        for data in ([graph_of(k) for k in range(7)], [(graph_of(k), k) for k in range(7)]):
            options = {"num_workers": workers, "collate_fn": 5, "persistent_workers": workers > 0}
            loading = made(data, 3, True, follow=["x"], exclude=["y"], **options)
            note(len(loading), loading.follow, type(loading.collate_fn).__name__, [list(loading) for _ in range(2)])


@program
def neighbours_as_geometric_loads_them(loader: Any, note: Note) -> None:
    """The loader is its own collate function, of the indices that are its data set."""

    class Neighbours(loader):  # type: ignore[misc]
        def __init__(self, graph: dict[int, list[int]], seeds: Any, **options: Any) -> None:
            self.graph = graph
            super().__init__(seeds, collate_fn=self.collate, **options)

        def collate(self, seeds: list[int]) -> Any:
            reached = sorted({n for seed in seeds for n in [int(seed), *self.graph[int(seed)]]})
            return torch.tensor(reached), len(seeds)

        def __call__(self, seeds: list[int]) -> Any:
            return self.collate(seeds)

    graph = {k: [(k * 3) % 8, (k + 1) % 8] for k in range(8)}
    for workers in (0, 2):
        loading = Neighbours(graph, range(8), batch_size=3, num_workers=workers)
        note(list(loading), loading([0, 1]))
        loading = Neighbours(graph, torch.arange(8), batch_size=3, shuffle=True, num_workers=workers)
        note(list(loading))


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


def made_again(loader: Any, loading: Any, rank: int) -> Any:
    """As accelerate does: a loader of the same options, with another batch sampler."""
    names = "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor"
    names += " persistent_workers pin_memory_device in_order"
    options = {name: getattr(loading, name) for name in names.split()}
    return loader(loading.dataset, batch_sampler=Sharded(loading.batch_sampler, rank, 2), **options)


@program
def loader_made_again_of_anothers_options(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        loading = loader(Images(), 4, True, num_workers=workers, generator=torch.Generator().manual_seed(3))
        for rank in range(2):
            loading.generator.manual_seed(3)
            again = made_again(loader, loading, rank)
            note(len(again), again.batch_size, list(again))


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
        note(attempt(setattr, loading, "batch_size", 5))
        note(attempt(setattr, loading, "name", "second"), loading.name)


if __name__ == "__main__":
    run()
