"""What samples become in a batch, with workers of each kind; `tests/full/programs` has hundreds of kinds of samples."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from drop_in.reading import next_error
from full.programs.watching import described
from torch.utils.data import Dataset, default_collate, default_convert


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
