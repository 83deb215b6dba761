"""Subclasses of the loader as libraries write them: endless ones, those of graphs, wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    default_collate,
)
from watching import Images, Note, program, run, seed_worker


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
            note(len(loading), type(loading).__name__)
            for epoch in range(3):
                for batch in loading:
                    note(workers, epoch, batch)


class Prefetching:
    """Normalizes each batch while the one before is trained on."""

    def __init__(self, loading: Any, mean: float, scale: float) -> None:
        self.loader, self.mean, self.scale = loading, mean, scale

    def __iter__(self) -> Iterator[Any]:
        waiting = None
        for images, labels in self.loader:
            images = images.float().sub_(self.mean).div_(self.scale)
            if waiting is not None:
                yield waiting
            waiting = images, labels
        if waiting is not None:
            yield waiting

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    @property
    def dataset(self) -> Any:
        return self.loader.dataset


def collate_quickly(samples: list[Any]) -> Any:
    images = torch.zeros((len(samples), *samples[0][0].shape), dtype=torch.uint8)
    for k, (image, _) in enumerate(samples):
        images[k] += image.to(torch.uint8)
    return images, torch.tensor([label for _, label in samples], dtype=torch.int64)


@program
def prefetching_wrapper_as_timm_does(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        loading = Prefetching(
            loader(Images(), 4, num_workers=workers, collate_fn=collate_quickly, pin_memory=False, drop_last=False),
            2,
            3,
        )
        note(len(loading), type(loading.sampler).__name__, loading.dataset.count)
        for epoch in range(2):
            for batch in loading:
                note(workers, epoch, batch)


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
        loading = made(
            dataset=data,
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            sampler=None,
            pin_memory=False,
            collate_fn=default_collate,
            worker_init_fn=seed_worker,
            generator=torch.Generator().manual_seed(6148914691236517205),
            drop_last=False,
        )
        note(len(loading), loading.batch_size, loading.num_workers)
        for epoch in range(3):
            if epoch == 2:
                data.transform = torch.neg  # as where mosaics are closed
                loading.reset()
            for batch in loading:
                note(workers, epoch, batch)
        del loading


# As PyTorch Geometric does


class Graph:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def names(self) -> list[str]:
        return sorted(vars(self))


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
        for key in graphs[0].names():
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
        def __init__(
            self,
            dataset: Any,
            batch_size: int = 1,
            shuffle: bool = False,
            follow: Any = None,
            exclude: Any = None,
            **options: Any,
        ) -> None:
            options.pop("collate_fn", None)
            self.follow, self.exclude = follow, exclude  # before the base's constructor
            super().__init__(dataset, batch_size, shuffle, collate_fn=Collater(dataset, follow, exclude), **options)

    return GraphLoader


def graph_of(k: int) -> Graph:
    nodes = 2 + k % 3
    return Graph(
        x=torch.full((nodes, 2), float(k)), edges=torch.tensor([[0, 1], [1, 0]]), name=f"graph {k}", y=torch.tensor([k])
    )


@program
def graphs_as_geometric_loads_them(loader: Any, note: Note) -> None:
    made = of_graphs(loader)
    for workers in (0, 2):
        for data in ([graph_of(k) for k in range(7)], [(graph_of(k), k) for k in range(7)]):
            loading = made(
                data,
                3,
                True,
                follow=["x"],
                exclude=["y"],
                num_workers=workers,
                collate_fn=5,
                persistent_workers=workers > 0,
            )
            note(len(loading), loading.follow, type(loading.collate_fn).__name__)
            for epoch in range(2):
                for batch in loading:
                    note(epoch, batch)


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


if __name__ == "__main__":
    run()
