"""The constructor: its parameters and checks, what the loader keeps of them, and what it warns of."""

from __future__ import annotations

import inspect
import multiprocessing.context
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert
from watching import Asking, Note, attempt, program, read, run, share


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Longer(Counting):
    """Gives two samples more than its length, in all workers together."""

    def __len__(self) -> int:
        return 4

    def __repr__(self) -> str:
        return "Longer()"

    def __iter__(self) -> Iterator[int]:
        return share(range(6))


@program
def parameters(loader: Any, note: Note) -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader).parameters
    given = inspect.signature(loader).parameters
    note([name for name, one in given.items() if one.kind is one.POSITIONAL_OR_KEYWORD])
    note([(name, given[name].kind.name, given[name].default) for name in theirs])


# Two mistakes at once: the second mistake of each line is the next check of torch.
# Each alone is in `options_that_are_wrong` of failures.py.
TWO_MISTAKES: list[dict[str, Any]] = [
    {"num_workers": -1, "timeout": -1},
    {"timeout": -1, "prefetch_factor": 2},
    {"prefetch_factor": 2, "persistent_workers": True},
    {"prefetch_factor": -1, "num_workers": 1, "multiprocessing_context": "x"},
    {"persistent_workers": True, "multiprocessing_context": "fork"},
    {"multiprocessing_context": "fork", "dataset": Counting(), "shuffle": True},
    {"dataset": Counting(), "shuffle": True, "sampler": [0]},
    {"dataset": Counting(), "sampler": [0], "batch_sampler": [[0]]},
    {"dataset": Counting(), "batch_sampler": [[0]], "drop_last": True},
    {"sampler": [0], "shuffle": True, "batch_sampler": [[0]]},
    {"batch_sampler": [[0]], "batch_size": None, "drop_last": True},
    {"batch_size": None, "drop_last": True, "dataset": [], "shuffle": True},
    {"dataset": [], "shuffle": True, "batch_size": 0},
    {"batch_size": 0, "drop_last": 1},
]


@program
def first_of_two_mistakes(loader: Any, note: Note) -> None:
    for options in TWO_MISTAKES:
        error = attempt(loader, **{"dataset": range(6), **options})
        note(error if isinstance(error, str) else "no error")


@program
def samplers_and_functions_that_are_kept(loader: Any, note: Note) -> None:
    data, generator, sampler, batch_sampler = range(6), torch.Generator(), [3, 1], [[0, 1], [2]]
    kept = (data, generator, sampler, batch_sampler, default_collate, default_convert)
    samplers = ({"sampler": sampler}, {"batch_sampler": batch_sampler})
    for options in ({}, {"shuffle": True}, {"batch_size": None}, *samplers):
        loading = loader(data, generator=generator, **options)
        source = getattr(loading.sampler, "data_source", None)
        used = (loading.dataset, loading.generator, loading.sampler, loading.batch_sampler, loading.collate_fn, source)
        note([[one is other for other in kept] for one in used])
        note(getattr(loading.batch_sampler, "sampler", None) is loading.sampler)
    endless = iter(loader(Counting()).sampler)
    note([next(endless) for _ in range(100)])
    for shuffle in (False, None):
        note(list(loader(Counting(), 3, shuffle)))


@program
def contexts(loader: Any, note: Note) -> None:
    for method in torch.multiprocessing.get_all_start_methods():
        loading = loader(range(6), num_workers=1, multiprocessing_context=method)
        context = loading.multiprocessing_context
        note(isinstance(context, multiprocessing.context.BaseContext), context.get_start_method() == method)
    spawning = torch.multiprocessing.get_context("spawn")
    for loading in (loader(range(6), num_workers=1), loader(range(6))):
        for value in (None, "x", 7, spawning, "fork"):
            note(attempt(setattr, loading, "multiprocessing_context", value))
            note(loading.multiprocessing_context is value)


@program
def subclasses_and_subscripts(loader: Any, note: Note) -> None:
    class Mine(loader):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.batch_size = self.sampler = self.dataset = self.drop_last = None
            super().__init__(*args, **options)
            self.ready = True

    class Generic(loader[int]):  # type: ignore[misc]
        pass

    loading = Mine(range(6), 4)
    note(loading.ready, loading.batch_size, list(loading))
    note(list(loader[int]([1, 2])), list(Generic([1, 2])), loader[int].__origin__ is loader)


def warned(act: Callable[..., Any], *given: Any, **options: Any) -> tuple[Any, list[tuple[str, str]]]:
    """The result, with type and text of each warning except about forks, which only torch's workers cause."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        result = act(*given, **options)
    return result, [(record.category.__name__, str(record.message)) for record in records]


@program
def more_workers_than_processors(loader: Any, note: Note) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        for workers in (0, 1, 2):
            for persistent in {False, workers > 0}:
                loading, texts = warned(loader, range(4), num_workers=workers, persistent_workers=persistent)
                note(texts, [warned(list, loading) for _ in range(2)])
        note(warned(attempt, loader, range(4), 0, num_workers=2))
    finally:
        os.sched_setaffinity(0, before)


@program
def more_samples_than_the_length(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        for size in (None, 2):
            loading = loader(Longer(), size, num_workers=workers)
            note("before the length was asked for", warned(list, loading))
            iterator = iter(loading)
            note(len(loading), "the iterator is older", warned(list, iterator))
            note("afterwards", warned(list, loading))


class NeverPinned:
    """A batch without a reason to be pinned."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def pin_memory(self) -> Any:
        raise AssertionError("not without an accelerator")


@program
def pinned_memory(loader: Any, note: Note) -> None:
    cuda = {"pin_memory_device": "cuda"}
    for workers in (0, 1):
        for options in ({"pin_memory": True}, {"pin_memory": True, **cuda}, cuda):
            loading, texts = warned(loader, torch.eye(2), 2, num_workers=workers, **options)
            iterator, texts_of_iterator = warned(iter, loading)
            note(texts, texts_of_iterator, warned(list, iterator))
    for collate in (NeverPinned, tuple):
        read(loader, note, [1, 2], 2, workers=(0, 1), pin_memory=True, collate_fn=collate)


class Stays(Asking):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("this one stays here")


@program
def data_set_that_cannot_be_pickled(loader: Any, note: Note) -> None:
    loading = loader(Stays(lambda _, index: index), num_workers=1, multiprocessing_context="spawn")
    error, texts = warned(attempt, list, loading)
    note(error[:40], [text[:60] for _, text in texts])


if __name__ == "__main__":
    run()
