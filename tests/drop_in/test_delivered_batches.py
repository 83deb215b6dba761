"""Memory of delivered batches."""

import io
from typing import Any

import pytest
import torch
from drop_in.acting import Made
from torch import tensor

import headrace as hr


def rows(count: int, width: int) -> Made:
    return Made(lambda k: torch.full((width,), float(k)), count)


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


def test_saved_batch_is_no_larger_than_its_values(loader_class: Any) -> None:
    loader = loader_class(rows(6, 10_000), 2, num_workers=2, collate_fn=lambda samples: (torch.stack(samples), 1))
    for batch, _ in loader:
        assert batch.untyped_storage().nbytes() == 2 * 10_000 * 4
        file = io.BytesIO()
        torch.save(batch, file)
        assert file.tell() < 2 * 10_000 * 4 + 5000
        assert torch.equal(torch.load(io.BytesIO(file.getvalue())), batch)


def test_places_are_used_again_when_epochs_are_left_early() -> None:
    loader = hr.DataLoader(rows(400, 20_000), 4, num_workers=2, prefetch_factor=4, persistent_workers=True)
    most = []
    for _ in range(12):
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        most.append(len(iterator._pool.places.segments))  # type: ignore[attr-defined]
    assert max(most) <= 2 * 2 * 4 + 4, "what is under way, twice while the older epoch ends, and what the trainer has"


def test_batches_of_ours_are_not_shared_until_they_are_asked_to_be() -> None:
    first, second = hr.DataLoader(rows(4, 10_000), 2, num_workers=1)
    assert not first.is_shared()
    first.share_memory_()
    assert first.is_shared()
    assert (first == tensor([[0.0], [1.0]])).all()
    with pytest.raises(RuntimeError, match="resiz"):
        second.resize_(3, 10_000)
