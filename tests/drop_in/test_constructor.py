"""The constructor: its parameters, its checks in their order, what the loader keeps, what may be set later."""

from __future__ import annotations

import inspect
import multiprocessing.context
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drop_in.classes import in_processes
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

import headrace as hr

METHODS = torch.multiprocessing.get_all_start_methods()

NUM_WORKERS = "num_workers option should be non-negative; use num_workers=0 to disable multiprocessing."
TIMEOUT = "timeout option should be non-negative"
PREFETCH = (
    "prefetch_factor option could only be specified in multiprocessing.let num_workers > 0 to enable "
    "multiprocessing, otherwise set prefetch_factor to None."
)
PREFETCH_NEGATIVE = "prefetch_factor option should be non-negative"
PERSISTENT = "persistent_workers option needs num_workers > 0"
CONTEXT_UNUSED = (
    "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got num_workers=0"
)
CONTEXT_UNKNOWN = (
    f"multiprocessing_context option should specify a valid start method in {METHODS!r}, "
    "but got multiprocessing_context='x'"
)
CONTEXT_TYPE = (
    "multiprocessing_context option should be a valid context object or a string specifying the start method, "
    "but got multiprocessing_context=7"
)
ITERABLE = "DataLoader with IterableDataset: expected unspecified {0} option, but got {0}={1}"
SHUFFLE_AND_SAMPLER = "sampler option is mutually exclusive with shuffle"
BATCH_SAMPLER = "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
UNBATCHED = "batch_size=None option disables auto-batching and is mutually exclusive with drop_last"
BATCH_SIZE = "batch_size should be a positive integer value, but got batch_size={}"
EMPTY = "num_samples should be a positive integer value, but got num_samples=0"


class Squares(Dataset[int]):
    def __init__(self, count: int = 6) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> int:
        return k * k


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


POSITIONAL = {
    "dataset": inspect.Parameter.empty,
    "batch_size": 1,
    "shuffle": None,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
}
BY_NAME = {"prefetch_factor": None, "persistent_workers": False, "pin_memory_device": "", "in_order": True}


@in_processes
def test_parameters_have_torchs_names_order_kinds_and_defaults(loader_class: Any) -> None:
    parameters = inspect.signature(loader_class).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    by_name = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert list(positional.items()) == list(POSITIONAL.items())
    assert by_name.items() >= BY_NAME.items()
    assert len(positional) + len(by_name) == len(parameters)


def told(loader_class: Any, cases: list[tuple[dict[str, Any], str]]) -> list[tuple[dict[str, Any], str]]:
    texts = []
    for options, _ in cases:
        with pytest.raises(ValueError) as caught:
            loader_class(**{"dataset": Squares()} | options)
        texts.append((options, str(caught.value)))
    return texts


# Two mistakes at once, and which of them is told: each line's second mistake is the next check that torch makes.
# Each by itself is among the `options_that_are_wrong` of `tests/full/programs/failures.py`.
ORDER: list[tuple[dict[str, Any], str]] = [
    ({"num_workers": -1, "timeout": -1}, NUM_WORKERS),
    ({"timeout": -1, "prefetch_factor": 2}, TIMEOUT),
    ({"prefetch_factor": 2, "persistent_workers": True}, PREFETCH),
    ({"prefetch_factor": -1, "num_workers": 1, "multiprocessing_context": "x"}, PREFETCH_NEGATIVE),
    ({"persistent_workers": True, "multiprocessing_context": "fork"}, PERSISTENT),
    ({"multiprocessing_context": "fork", "dataset": Counting(), "shuffle": True}, CONTEXT_UNUSED),
    ({"dataset": Counting(), "shuffle": True, "sampler": [0]}, ITERABLE.format("shuffle", True)),
    ({"dataset": Counting(), "sampler": [0], "batch_sampler": [[0]]}, ITERABLE.format("sampler", [0])),
    ({"dataset": Counting(), "batch_sampler": [[0]], "drop_last": True}, ITERABLE.format("batch_sampler", [[0]])),
    ({"sampler": [0], "shuffle": True, "batch_sampler": [[0]]}, SHUFFLE_AND_SAMPLER),
    ({"batch_sampler": [[0]], "batch_size": None, "drop_last": True}, BATCH_SAMPLER),
    ({"batch_size": None, "drop_last": True, "dataset": [], "shuffle": True}, UNBATCHED),
    ({"dataset": [], "shuffle": True, "batch_size": 0}, EMPTY),
    ({"batch_size": 0, "drop_last": 1}, BATCH_SIZE.format(0)),
]


def test_the_first_check_that_fails_is_told_when_two_do(loader_class: Any) -> None:
    assert told(loader_class, ORDER) == ORDER


UNCHECKED = [{"num_workers": 1.5}, {"collate_fn": 5}, {"sampler": 5}, {"batch_sampler": 5}]


def test_what_is_of_no_use_is_a_type_error_before_the_first_batch(loader_class: Any) -> None:
    for options in UNCHECKED:
        with pytest.raises(TypeError):
            list(loader_class(Squares(), **options))


def test_ours_notices_while_it_is_built_what_torch_notices_at_the_first_use() -> None:
    for options in UNCHECKED:
        with pytest.raises(TypeError, match=next(iter(options))):
            hr.DataLoader(Squares(), **options)
    for options in ({"prefetch_factor": 0, "num_workers": 1}, {"timeout": 1}):
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            hr.DataLoader(Squares(), **options)
        assert isinstance(caught.value, AssertionError), "code that expects torch's error has to catch ours"


@pytest.mark.parametrize("shuffle", [False, None])
def test_an_iterable_data_set_may_be_said_not_to_be_shuffled(loader_class: Any, shuffle: bool | None) -> None:
    assert len(list(loader_class(Counting(), 3, shuffle))) == 2


def test_attributes_hold_the_parameters(loader_class: Any) -> None:
    generator, collate, init = torch.Generator(), list, print
    data = Squares()
    loader = loader_class(
        data, 3, True, num_workers=2, collate_fn=collate, pin_memory=True, drop_last=True, timeout=5,
        worker_init_fn=init, generator=generator, prefetch_factor=4, persistent_workers=True,
        pin_memory_device="cuda", in_order=False,
    )  # fmt: skip
    assert loader.dataset is data
    assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.prefetch_factor) == (3, True, 2, 4)
    assert (loader.pin_memory, loader.pin_memory_device, loader.in_order) == (True, "cuda", False)
    assert (loader.timeout, loader.persistent_workers, loader.multiprocessing_context) == (5, True, None)
    assert loader.collate_fn is collate
    assert loader.worker_init_fn is init
    assert loader.generator is generator


def test_samplers_are_torchs_own_when_none_is_given(loader_class: Any) -> None:
    data, generator = Squares(), torch.Generator()
    in_order = loader_class(data, 2, drop_last=True)
    assert type(in_order.sampler) is SequentialSampler
    assert in_order.sampler.data_source is data
    assert type(in_order.batch_sampler) is BatchSampler
    assert in_order.batch_sampler.sampler is in_order.sampler
    assert (in_order.batch_sampler.batch_size, in_order.batch_sampler.drop_last) == (2, True)
    shuffled = loader_class(data, shuffle=True, generator=generator)
    assert type(shuffled.sampler) is RandomSampler
    assert shuffled.sampler.generator is generator
    unbatched = loader_class(data, batch_size=None)
    assert type(unbatched.sampler) is SequentialSampler
    assert unbatched.batch_sampler is None


def test_samplers_are_kept_as_they_are_when_given(loader_class: Any) -> None:
    sampler, batch_sampler = [3, 1], [[0, 1], [2]]
    assert loader_class(Squares(), sampler=sampler).sampler is sampler
    given = loader_class(Squares(), batch_sampler=batch_sampler)
    assert given.batch_sampler is batch_sampler
    assert (given.batch_size, given.drop_last) == (None, False)
    assert type(given.sampler) is SequentialSampler


def test_sampler_of_an_iterable_data_set_never_ends(loader_class: Any) -> None:
    sampler = iter(loader_class(Counting()).sampler)
    assert [next(sampler) for _ in range(100)] == [None] * 100


def test_collate_fn_is_torchs_own_function_when_none_is_given(loader_class: Any) -> None:
    assert loader_class(Squares()).collate_fn is default_collate
    assert loader_class(Squares(), batch_sampler=[[0]]).collate_fn is default_collate
    assert loader_class(Squares(), batch_size=None).collate_fn is default_convert
    assert loader_class(Squares())._auto_collation is True
    assert loader_class(Squares(), batch_size=None)._auto_collation is False


@in_processes
@pytest.mark.parametrize("method", METHODS)
def test_context_is_an_object_when_its_name_was_given(loader_class: Any, method: str) -> None:
    loader = loader_class(Squares(), num_workers=1, multiprocessing_context=method)
    assert isinstance(loader.multiprocessing_context, multiprocessing.context.BaseContext)
    assert loader.multiprocessing_context.get_start_method() == method
    loader.multiprocessing_context = None
    assert loader.multiprocessing_context is None


@in_processes
def test_context_is_checked_when_it_is_set_later(loader_class: Any) -> None:
    loader = loader_class(Squares(), num_workers=1)
    with pytest.raises(ValueError) as caught:
        loader.multiprocessing_context = "x"
    assert str(caught.value) == CONTEXT_UNKNOWN
    with pytest.raises(TypeError) as wrong_type:
        loader.multiprocessing_context = 7
    assert str(wrong_type.value) == CONTEXT_TYPE
    context = torch.multiprocessing.get_context("spawn")
    loader.multiprocessing_context = context
    assert loader.multiprocessing_context is context
    alone = loader_class(Squares())
    with pytest.raises(ValueError) as unused:
        alone.multiprocessing_context = "fork"
    assert str(unused.value) == CONTEXT_UNUSED


def test_subclass_may_set_attributes_before_the_constructor_ran(loader_class: Any) -> None:
    class Mine(loader_class):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.batch_size = self.sampler = self.dataset = self.drop_last = None
            super().__init__(*args, **options)
            self.ready = True

    loader = Mine(Squares(), 4)
    assert loader.ready
    assert loader.batch_size == 4
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25]]


def test_class_is_subscribed_as_a_generic_one(loader_class: Any) -> None:
    class Mine(loader_class[int]):
        pass

    assert list(loader_class[int]([1, 2])) == [1, 2]
    assert list(Mine([1, 2])) == [1, 2]
    assert loader_class[int].__origin__ is loader_class
