"""What arrives in the trainer is what collate_fn returned: any type, for good, its own; pinned if asked for."""

from __future__ import annotations

import dataclasses
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from naming import name_of
from torch import tensor
from torch.utils.data import Dataset

import headrace as hr

both = pytest.mark.parametrize("num_workers", [0, 2])
needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without one")


class Rows(Dataset[torch.Tensor]):
    """Sample k is `width` times k."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> torch.Tensor:
        return torch.full((self.width,), float(k))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    rows: torch.Tensor
    notes: dict[str, Any]


class Batch:
    """A type of the user's own, which knows how it is pinned."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.rows, self.pinned_by_itself = torch.stack(samples), False

    def pin_memory(self) -> Batch:
        self.rows, self.pinned_by_itself = self.rows.pin_memory(), True
        return self


class NeverPinned(Batch):
    def pin_memory(self) -> Batch:
        raise AssertionError("there is nothing to pin it for")


# Any type


RETURNED: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a number": lambda: 7,
    "a set": lambda: {1, 2},
    "a type": lambda: dict,
    "an array": lambda: np.arange(6.0).reshape(2, 3),
    "an array in Fortran's order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "a tuple": lambda: (tensor([1]), "a"),
    "a named tuple": lambda: Pair(tensor([1]), np.ones(2)),
    "an ordered dict": lambda: OrderedDict(b=tensor([1]), a=[tensor([2])]),
    "a tensor with strides": lambda: torch.arange(6).view(2, 3).T,
    "a large tensor with strides": lambda: torch.arange(60_000).view(200, 300).T,
    "an expanded tensor": lambda: torch.ones(1).expand(5),
    "a tensor of no elements": lambda: torch.empty(0, 4),
    "a tensor of half precision": lambda: torch.ones(3, dtype=torch.bfloat16),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a tensor that requires gradients": lambda: torch.ones(2, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
}


def told(value: Any) -> Any:
    """The type and all values, as what can be compared."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense()
        return type(value), value.dtype, value.layout, value.requires_grad, tuple(value.shape), dense.tolist()
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.flags.f_contiguous, value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, told(part)) for key, part in value.items()]
    return (type(value), [told(part) for part in value]) if isinstance(value, list | tuple) else (type(value), value)


@pytest.mark.slow
@both
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_batches_are_what_collate_fn_returned_of_whatever_type(loader_class: Any, num_workers: int) -> None:
    keys = list(RETURNED)
    loader = loader_class(keys, None, num_workers=num_workers, collate_fn=lambda name: RETURNED[name]())
    for name, batch in zip(keys, loader, strict=True):
        assert told(batch) == told(RETURNED[name]()), name


@pytest.mark.slow
@both
def test_a_batch_that_is_an_exception_is_given_not_raised(loader_class: Any, num_workers: int) -> None:
    loader = loader_class([1, 2], None, num_workers=num_workers, collate_fn=lambda k: ValueError(k))
    assert [(type(batch), batch.args) for batch in loader] == [(ValueError, (1,)), (ValueError, (2,))]


@pytest.mark.slow
@both
def test_batches_are_of_the_users_own_classes(loader_class: Any, num_workers: int) -> None:
    records = loader_class(
        Rows(4, 5000), 2, num_workers=num_workers, collate_fn=lambda rows: Record(torch.stack(rows), {"n": len(rows)})
    )
    for k, record in enumerate(records):
        assert type(record) is Record
        assert record.rows[:, 0].tolist() == [2 * k, 2 * k + 1]
        assert record.notes == {"n": 2}
        assert dataclasses.replace(record, notes={}).notes == {}
    own = list(loader_class(Rows(2, 5000), 2, num_workers=num_workers, collate_fn=Batch))
    assert [type(batch) for batch in own] == [Batch]
    assert own[0].rows.shape == (2, 5000)


@pytest.mark.slow
def test_values_are_right_when_a_tensor_is_conjugated_lazily() -> None:
    # Of ours alone: torch's loader loses the sign in a worker, and fails to make a batch of them.
    numbers = [tensor([1 + 2j, 3 - 4j]), tensor([5j, 6])]
    lazy = [x.conj() for x in numbers] + [x.conj().imag for x in numbers]
    for size in (None, 2):
        expected = [batch.tolist() for batch in hr.DataLoader(lazy, size)]
        for workers in (1, 2):
            assert [batch.tolist() for batch in hr.DataLoader(lazy, size, num_workers=workers)] == expected
    assert expected[0] == [[1 - 2j, 3 + 4j], [-5j, 6]]


# For good, and the trainer's own


@pytest.mark.slow
@both
@pytest.mark.parametrize("collate", [None, torch.stack, lambda rows: {"rows": np.stack(rows)}], ids=name_of)
def test_batches_stay_what_they_were_when_all_are_kept(loader_class: Any, num_workers: int, collate: Any) -> None:
    loader = loader_class(Rows(40, 10_000), 2, num_workers=num_workers, collate_fn=collate)
    kept = [batch["rows"] if isinstance(batch, dict) else batch for batch in loader]
    for k, batch in enumerate(kept):
        assert (np.asarray(batch) == [[2 * k], [2 * k + 1]]).all()


@pytest.mark.slow
@both
@pytest.mark.parametrize("collate", [None, torch.stack, lambda rows: torch.stack(rows).numpy()], ids=name_of)
def test_batches_may_be_written_to_without_a_change_to_others(
    loader_class: Any, num_workers: int, collate: Any
) -> None:
    kept = []
    for k, batch in enumerate(loader_class(Rows(12, 10_000), 2, num_workers=num_workers, collate_fn=collate)):
        assert (np.asarray(batch) == [[2 * k], [2 * k + 1]]).all()
        batch += 1000
        kept.append(batch)
    for k, batch in enumerate(kept):
        assert (np.asarray(batch) == [[1000 + 2 * k], [1001 + 2 * k]]).all()


@pytest.mark.slow
@both
def test_batches_outlive_their_loader(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Rows(4, 10_000), 2, num_workers=num_workers)
    iterator = iter(loader)
    batch = next(iterator)
    del iterator, loader
    assert (batch == tensor([[0.0], [1.0]])).all()


@pytest.mark.slow
@both
def test_saved_batch_is_no_larger_than_its_values(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Rows(6, 10_000), 2, num_workers=num_workers, collate_fn=lambda rows: (torch.stack(rows), 1))
    for batch, _ in loader:
        assert batch.untyped_storage().nbytes() == 2 * 10_000 * 4
        file = io.BytesIO()
        torch.save(batch, file)
        assert file.tell() < 2 * 10_000 * 4 + 5000
        assert torch.equal(torch.load(io.BytesIO(file.getvalue())), batch)


def test_batches_of_ours_are_not_shared_until_they_are_asked_to_be() -> None:
    first, second = hr.DataLoader(Rows(4, 10_000), 2, num_workers=1)
    assert not first.is_shared()
    first.share_memory_()
    assert first.is_shared()
    assert (first == tensor([[0.0], [1.0]])).all()
    with pytest.raises(RuntimeError, match="resiz"):
        second.resize_(3, 10_000)


# Pinned memory


@pytest.mark.slow
@both
@without_accelerator
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_nothing_is_pinned_when_there_is_no_accelerator(loader_class: Any, num_workers: int) -> None:
    (batch,) = loader_class(Rows(2, 3), 2, num_workers=num_workers, pin_memory=True)
    assert batch.tolist() == [[0, 0, 0], [1, 1, 1]]
    (own,) = loader_class(Rows(2, 3), 2, num_workers=num_workers, pin_memory=True, collate_fn=NeverPinned)
    assert type(own) is NeverPinned
    (parts,) = loader_class(
        [(1, "a")], None, num_workers=num_workers, pin_memory=True, collate_fn=lambda sample: sample
    )
    assert parts == (1, "a")


@both
@pytest.mark.gpu
@pytest.mark.usefixtures("accelerator")
@needs_accelerator
def test_tensors_are_pinned_in_all_parts_of_a_batch(loader_class: Any, num_workers: int) -> None:
    def collate(samples: list[torch.Tensor]) -> Any:
        rows = torch.stack(samples)
        return {"tuple": (rows, "a"), "named": Pair(rows, b"b"), "list": [rows, 1], "none": None}

    for batch in loader_class(Rows(4, 5000), 2, num_workers=num_workers, pin_memory=True, collate_fn=collate):
        assert type(batch["tuple"]) is tuple
        assert type(batch["named"]) is Pair
        assert (batch["tuple"][1], batch["named"].right, batch["list"][1], batch["none"]) == ("a", b"b", 1, None)
        for rows in (batch["tuple"][0], batch["named"].left, batch["list"][0]):
            assert rows.is_pinned()
            assert rows.shape == (2, 5000)


@both
@pytest.mark.gpu
@pytest.mark.usefixtures("accelerator")
@needs_accelerator
def test_types_with_a_method_for_it_pin_themselves(loader_class: Any, num_workers: int) -> None:
    for k, batch in enumerate(loader_class(Rows(4, 50), 2, num_workers=num_workers, pin_memory=True, collate_fn=Batch)):
        assert type(batch) is Batch
        assert batch.pinned_by_itself
        assert batch.rows.is_pinned()
        assert batch.rows[:, 0].tolist() == [2 * k, 2 * k + 1]
