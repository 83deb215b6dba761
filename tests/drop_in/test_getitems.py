"""`__getitems__` where ours differs from torch; `tests/full/programs/samplers.py` has what both do."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from drop_in.reading import next_error
from full.programs.watching import described
from torch.utils.data import Dataset


class Columns(Mapping[str, Any]):
    """Columns with a number of rows, as a TensorDict has: its length is not that of its keys."""

    def __init__(self, columns: dict[str, Any], rows: int) -> None:
        self.columns, self.rows = columns, rows

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return self.rows


class Rows(list[Any]):
    source = "a table"


class Two(NamedTuple):
    first: Any
    second: Any


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "dict": lambda keys: {"x": torch.tensor(keys), "names": [str(key) for key in keys]},
    "dict of as many columns as keys": lambda keys: {key: key for key in keys},
    "mapping": lambda keys: Columns({"x": torch.tensor(keys)}, len(keys)),
    "tensor": lambda keys: torch.tensor(keys).unsqueeze(1).expand(-1, 3000),
    "array": lambda keys: np.array(keys),
    "array of records": lambda keys: np.array([(key, key) for key in keys], dtype=[("a", "i4"), ("b", "f4")]),
    "tuple": lambda keys: (torch.tensor(keys), torch.tensor(keys) + 1),
    "named tuple": lambda keys: Two(np.array(keys), [str(key) for key in keys]),
    "list": lambda keys: [torch.full((3000,), key) for key in keys],
    "kind of list": lambda keys: Rows(keys),
    "deque": lambda keys: collections.deque(keys),
    "range": lambda keys: range(keys[0], keys[-1] + 1),
    "string": lambda keys: "".join(map(str, keys)),
    "bytes": lambda keys: bytes(keys),
    "generator": lambda keys: (key for key in keys),
    "number": lambda keys: sum(keys),
    "None": lambda keys: None,
}


class Many(Dataset[Any]):
    """A key is a form and a number: the first key chooses the form of the samples."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("whole batches are asked for")

    def __getitems__(self, keys: list[Any]) -> Any:
        return FORMS[keys[0][0]]([number for _, number in keys])


def test_economic_mode_refuses_batches_that_cannot_be_divided_among_workers(our_class: Any) -> None:
    keys = [[(form, number) for number in (4, 2, 3)] for form in FORMS]
    with our_class(Many(), batch_sampler=keys, num_workers=2, economic=True, collate_fn=described) as loader:
        iterator = iter(loader)
        for form, make in FORMS.items():
            if form == "list":
                assert next(iterator) == described(make([4, 2, 3]))
                continue
            error = next_error(iterator)
            assert isinstance(error, TypeError)
            assert f"__getitems__ gave a {type(make([1])).__qualname__}: " in str(error)
            assert "economic=False" in str(error)


def test_getitems_that_raises_stop_iteration_is_an_error(our_class: Any) -> None:
    class Ends(Many):
        def __getitems__(self, keys: list[int]) -> Any:
            raise StopIteration

    error = next_error(iter(our_class(Ends(), 4, num_workers=1)))
    assert isinstance(error, RuntimeError)
    assert "__getitems__([0, 1, 2, 3]) raised StopIteration" in str(error)
