"""`__getitems__`: the collate function is given exactly what it gives, as with torch's loader."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drop_in.reading import next_error
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
    "list of columns": lambda keys: [torch.tensor(keys), keys],
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
    """The first key of a batch says in which form the samples of the others are given."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("whole batches are asked for")

    def __getitems__(self, keys: list[Any]) -> Any:
        return FORMS[keys.pop(0)](keys)


def described(value: Any) -> Any:
    kind = type(value).__qualname__
    if isinstance(value, Columns):
        return kind, value.rows, described(value.columns)
    if isinstance(value, dict):
        return kind, {key: described(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return kind, str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, list | tuple | collections.deque | types.GeneratorType):
        return kind, [described(part) for part in value]
    return kind, value


KEYS = [[form, 4, 2, 3] for form in FORMS]


def read(loader: Any) -> dict[str, Any]:
    iterator, found = iter(loader), {}
    for form in FORMS:
        try:
            found[form] = described(next(iterator))
        except StopIteration:
            raise AssertionError("the epoch is not over yet") from None
        except Exception:
            found[form] = "an error"
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_default_collate_makes_of_it_what_it_makes_with_torch(our_class: Any, num_workers: int) -> None:
    theirs, keys = read(torch.utils.data.DataLoader(Many(), batch_sampler=copy.deepcopy(KEYS))), copy.deepcopy(KEYS)
    assert theirs["list"] == ("Tensor", "torch.int64", (3, 3000), [[4] * 3000, [2] * 3000, [3] * 3000])
    assert theirs["dict"] == "an error"
    assert read(our_class(Many(), batch_sampler=keys, num_workers=num_workers)) == theirs
    assert not num_workers or keys == KEYS, "the data set of a worker changes its own copy"


def test_economic_mode_refuses_what_it_could_not_put_together(our_class: Any) -> None:
    """A batch is divided among workers: of columns nobody could tell how they belong together."""

    class Told(Many):
        def __getitems__(self, keys: list[Any]) -> Any:
            return FORMS[keys[0][0]]([number for _, number in keys])

    forms = [form for form in FORMS if form != "list of columns"]  # nobody can tell these from samples
    keys = [[(form, number) for number in (4, 2, 3)] for form in forms]
    with our_class(Told(), batch_sampler=keys, num_workers=2, economic=True, collate_fn=described) as loader:
        iterator = iter(loader)
        for form in forms:
            if form == "list":
                assert next(iterator) == described(FORMS[form]([4, 2, 3]))
                continue
            error = next_error(iterator)
            assert isinstance(error, TypeError)
            assert f"__getitems__ gave a {type(FORMS[form]([1])).__qualname__}: " in str(error)
            assert "economic=False" in str(error)


def test_getitems_that_raises_stop_iteration_is_an_error(our_class: Any) -> None:
    class Ends(Many):
        def __getitems__(self, keys: list[int]) -> Any:
            raise StopIteration

    error = next_error(iter(our_class(Ends(), 4, num_workers=1)))
    assert isinstance(error, RuntimeError)
    assert "__getitems__([0, 1, 2, 3]) raised StopIteration" in str(error)


def test_getitems_may_give_more_samples_than_keys(our_class: Any) -> None:
    class Doubling(Many):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [np.full(2000, key, np.float32) for key in keys for _ in range(2)]

    for size in (2, 4):
        first, *_ = our_class(Doubling(), batch_size=size, num_workers=1)
        assert first[:, 0].tolist() == [float(key) for key in range(size) for _ in range(2)]
