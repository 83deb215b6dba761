"""What arrives in the trainer is its own, for good; pinned if asked for."""

from __future__ import annotations

import io
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


@pytest.mark.parametrize("collate", [torch.stack, lambda rows: {"rows": np.stack(rows)}], ids=name_of)
def test_batches_are_the_trainers_own_for_good(loader_class: Any, collate: Any) -> None:
    loader = loader_class(Rows(40, 10_000), 2, num_workers=2, collate_fn=collate)
    kept = []
    for batch in loader:
        rows = batch["rows"] if isinstance(batch, dict) else batch
        kept.append(rows)
        rows += 1000
    del loader, batch
    for k, rows in enumerate(kept):
        assert (np.asarray(rows) == [[1000 + 2 * k], [1001 + 2 * k]]).all()


def test_saved_batch_is_no_larger_than_its_values(loader_class: Any) -> None:
    loader = loader_class(Rows(6, 10_000), 2, num_workers=2, collate_fn=lambda rows: (torch.stack(rows), 1))
    for batch, _ in loader:
        assert batch.untyped_storage().nbytes() == 2 * 10_000 * 4
        file = io.BytesIO()
        torch.save(batch, file)
        assert file.tell() < 2 * 10_000 * 4 + 5000
        assert torch.equal(torch.load(io.BytesIO(file.getvalue())), batch)


def test_places_are_used_again_when_epochs_are_left_early() -> None:
    loader = hr.DataLoader(Rows(400, 20_000), 4, num_workers=2, prefetch_factor=4, persistent_workers=True)
    most = []
    for _ in range(12):
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        most.append(len(iterator._pool.places.segments))  # type: ignore[attr-defined]
    assert max(most) <= 2 * 2 * 4 + 4, "what is under way, twice while the older epoch ends, and what the trainer has"


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
