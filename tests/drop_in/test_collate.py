"""What samples become in a batch, with workers of each kind; `tests/full/programs` has hundreds of kinds of samples."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drop_in.reading import next_error
from full.programs.watching import described
from torch.utils.data import Dataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map


class Made(Dataset[Any]):
    """What each of some functions makes, twice in turn: a batch of two is of one function."""

    def __init__(self, *makers: Callable[[int], Any]) -> None:
        self.makers = makers

    def __len__(self) -> int:
        return 2 * len(self.makers)

    def __getitem__(self, index: int) -> Any:
        return self.makers[index // 2](index)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any = None


MAKERS: list[Callable[[int], Any]] = [
    lambda k: torch.full((50, 70), float(k)),
    lambda k: torch.arange(6.0).reshape(2, 3).T + k,
    lambda k: np.full((50, 70), k).T,
    lambda k: np.float32(k),
    lambda k: k / 2,
    lambda k: f"the {k}th",
    lambda k: {"image": torch.full((5000,), k), "names": [b"x" * k, {"even": k % 2 == 0}]},
    lambda k: Point(np.full(5000, k), (k, "a")),
    lambda k: OrderedDict(b=k, a=1.5),
    lambda k: UserDict(a=torch.full((5000,), k)),
]


def test_batches_are_what_torchs_functions_make_of_their_samples(loader_class: Any) -> None:
    data = Made(*MAKERS)
    batches = list(loader_class(data, 2, num_workers=2))
    expected = [default_collate([make(2 * k), make(2 * k + 1)]) for k, make in enumerate(MAKERS)]
    assert [described(batch) for batch in batches] == [described(batch) for batch in expected]
    samples = list(loader_class(data, None, num_workers=2))
    assert [described(sample) for sample in samples] == [described(default_convert(data[k])) for k in range(len(data))]


def test_default_collate_refuses_what_it_has_no_rule_for(loader_class: Any) -> None:
    iterator = iter(loader_class(Made(lambda _: None, lambda k: torch.ones(k), Pair), 2, num_workers=2))
    assert isinstance(next_error(iterator), TypeError)
    unequal = next_error(iterator)
    assert isinstance(unequal, RuntimeError)
    assert "stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1" in str(unequal)
    assert "default_collate: batch must contain tensors" in str(next_error(iterator))


def test_rows_of_a_mapped_file_become_tensors(loader_class: Any, tmp_path: Path) -> None:
    written = np.memmap(tmp_path / "rows", "f4", "w+", shape=(4, 3))
    written[:] = np.arange(12).reshape(4, 3)
    batches = list(loader_class(written, 2, num_workers=2))
    assert [batch.tolist() for batch in batches] == torch.arange(12.0).view(2, 2, 3).tolist()


def test_tensors_of_unequal_dtypes_are_promoted_in_the_process(loader_class: Any) -> None:
    for first in (torch.float32, torch.int64):
        data = Made(lambda k, first=first: torch.tensor([k], dtype=torch.float64 if k else first))
        assert described(next(iter(loader_class(data, 2)))) == described(torch.tensor([[0.0], [1.0]]).double())


def test_tensors_of_unequal_dtypes_become_the_firsts_where_that_can_hold_them_in_a_worker(loader_class: Any) -> None:
    data = Made(lambda k: torch.tensor([k], dtype=torch.float64 if k else torch.float32))
    assert described(next(iter(loader_class(data, 2, num_workers=1)))) == described(torch.tensor([[0.0], [1.0]]))
    mixed = Made(lambda k: torch.tensor([k], dtype=torch.float32 if k else torch.int64))
    error = next_error(iter(loader_class(mixed, 2, num_workers=1)))
    assert isinstance(error, TypeError)
    assert "input types can't be cast to the desired output type Long" in str(error)


@pytest.fixture
def registry() -> Iterator[dict[Any, Any]]:
    """torch's own, as it was before after the test."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def test_functions_of_the_users_registry_are_used(loader_class: Any, registry: dict[Any, Any]) -> None:
    registry[Pair] = lambda batch, *, collate_fn_map: Pair([sample.left for sample in batch], len(batch))
    registry[torch.Tensor] = lambda batch, *, collate_fn_map: torch.cat([part.flatten() for part in batch])
    data = Made(lambda k: {"a": (Pair(k), k)}, lambda k: torch.ones(1, k))
    nested, joined = loader_class(data, 2, num_workers=2)
    assert nested["a"][0] == Pair([0, 1], 2)
    assert joined.tolist() == [1.0] * 5
