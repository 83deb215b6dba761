"""Tensors of every form, as samples, within batches of one's own, and held by the data set."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import default_collate
from watching import Asking, Made, Note, compare, program, read, run, unchanged


class Image(torch.Tensor):
    """A kind of tensor of the user's."""


class Tagged(torch.Tensor):
    """Carries something beside its values."""

    tag: str

    @staticmethod
    def __new__(cls, data: torch.Tensor, tag: str = "none") -> Self:
        made = torch.Tensor._make_subclass(cls, data)
        made.tag = tag
        return made

    def __init__(self, data: torch.Tensor, tag: str = "none") -> None:
        super().__init__()


def numbered(k: int, *shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) + k


@program
def views_and_strides(loader: Any, note: Note) -> None:
    makers = {
        "of no dimension": lambda k: torch.tensor(float(k)),
        "of no element": lambda _: torch.empty(0, 3),
        "empty in the middle": lambda _: torch.empty(2, 0, 4),
        "one element": lambda k: torch.tensor([k]),
        "transposed": lambda k: numbered(k, 2, 3).T,
        "permuted": lambda k: numbered(k, 2, 3, 4).permute(2, 0, 1),
        "every second": lambda k: numbered(k, 8)[::2],
        "after an offset": lambda k: numbered(k, 10)[5:],
        "expanded": lambda k: torch.tensor([float(k)]).expand(4),
        "flipped": lambda k: numbered(k, 4).flip(0),
        "diagonal": lambda k: numbered(k, 3, 3).diagonal(),
        "unfolded": lambda k: numbered(k, 6).unfold(0, 3, 1),
        "channels last": lambda k: numbered(k, 1, 3, 4, 4).to(memory_format=torch.channels_last),
        "large and transposed": lambda k: numbered(k, 60, 70).T,
        "large with channels last": lambda k: numbered(k, 1, 3, 40, 40).to(memory_format=torch.channels_last),
        "many dimensions": lambda k: numbered(k, 1, 2, 1, 2, 1, 2, 1),
        "another shape in the second": lambda k: numbered(k, 2 + k % 2, 3),
        "another dtype in the second": lambda k: numbered(k, 3).to(torch.float64 if k % 2 else torch.float32),
        "one that the first cannot hold": lambda k: numbered(k, 3).to(torch.float32 if k % 2 else torch.int64),
    }
    compare(loader, note, makers)


@program
def complex_views(loader: Any, note: Note) -> None:
    # Without workers: those of torch lose the sign of lazily conjugated tensors.
    lazy = {
        "conjugated": lambda k: torch.tensor([1 + 2j, k + 1j]).conj(),
        "negative": lambda k: torch.tensor([1 + 2j, k + 1j]).conj().imag,
    }
    for size in (None, 2):
        read(loader, note, Made(lazy), size, workers=(0,))
    makers = {
        "real part": lambda k: torch.tensor([1 + 2j, k + 1j]).real,
        "as real": lambda k: torch.view_as_real(torch.tensor([1 + 2j, k + 1j])),
    }
    compare(loader, note, makers)


@program
def tensors_with_gradients(loader: Any, note: Note) -> None:
    makers = {
        "leaf": lambda k: torch.full((2,), float(k), requires_grad=True),
        "parameter": lambda k: torch.nn.Parameter(torch.full((2,), float(k))),
        "frozen parameter": lambda k: torch.nn.Parameter(torch.full((2,), float(k)), requires_grad=False),
        "buffer": lambda k: torch.nn.Buffer(torch.full((2,), float(k))),
    }
    read(loader, note, Made(makers), None, collate_fn=unchanged)
    read(loader, note, Made(makers), 2, workers=(0,))
    with torch.no_grad():
        read(loader, note, Made(makers), 2, workers=(0,))


@program
def kinds_of_ones_own(loader: Any, note: Note) -> None:
    makers = {
        "kind": lambda k: numbered(k, 2, 3).as_subclass(Image),
        "large kind": lambda k: numbered(k, 50, 60).as_subclass(Image),
        "with an attribute": lambda k: Tagged(numbered(k, 2), tag=f"the {k}th"),
        "attribute of a plain one": lambda k: with_attribute(numbered(k, 3)),
    }
    compare(loader, note, makers)


def with_attribute(value: torch.Tensor) -> torch.Tensor:
    value.note = "of the user's"  # type: ignore[attr-defined]
    return value


@program
def sparse_tensors(loader: Any, note: Note) -> None:
    makers = {
        "coordinates": lambda k: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, float(k)], (2, 3)),
        "coalesced": lambda k: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, float(k)], (2, 3)).coalesce(),
        "rows": lambda k: torch.tensor([[0.0, k + 1.0], [2.0, 0.0]]).to_sparse_csr(),
        "empty": lambda _: torch.sparse_coo_tensor(size=(2, 3)),
    }
    compare(loader, note, makers)


@program
def nested_tensors(loader: Any, note: Note) -> None:
    makers = {
        "jagged": lambda k: torch.nested.nested_tensor([torch.ones(2) * k, torch.ones(3)], layout=torch.jagged),
        "strided": lambda k: torch.nested.nested_tensor([torch.ones(2) * k, torch.ones(3)], layout=torch.strided),
    }
    read(loader, note, Made(makers), 2)


@program
def storages_and_generators(loader: Any, note: Note) -> None:
    def collate(samples: list[torch.Tensor]) -> Any:
        sample = samples[0]
        return [sample.untyped_storage().nbytes(), torch.Generator().manual_seed(5).get_state(), sample.numpy()]

    read(loader, note, [numbered(k, 3) for k in range(4)], collate_fn=collate)


@program
def batches_of_one_form_and_then_another(loader: Any, note: Note) -> None:
    """The form of the first batch does not bind those after it."""

    def changing(_: Any, k: int) -> Any:
        forms: list[Any] = [
            numbered(k, 30, 30),
            numbered(k, 30, 31),
            numbered(k, 30, 30).double(),
            numbered(k, 30, 30).numpy(),
            {"a": numbered(k, 30, 30)},
            {"a": numbered(k, 30, 30), "b": k},
            {"b": k, "a": numbered(k, 30, 30)},
            (numbered(k, 30, 30), k),
            [numbered(k, 30, 30), float(k)],
            numbered(k, 30, 30).as_subclass(Image),
            numbered(k, 30, 30).T,
            k,
            float(k),
            f"{k}",
            numbered(k, 30, 30),
        ]
        return forms[k // 4]

    for size in (2, 4):
        read(loader, note, Asking(changing, count=60), size, workers=(0, 1, 2))


@program
def default_dtype_and_device(loader: Any, note: Note) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        read(loader, note, [1.5, 2.5], 2, workers=(0, 1), collate_fn=torch.tensor)
    finally:
        torch.set_default_dtype(before)


@program
def batches_that_are_changed_in_place_and_kept(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        kept = []
        for batch in loader([numbered(k, 40, 50) for k in range(12)], 2, num_workers=workers):
            batch += 1000
            kept.append((batch, batch[0], batch.numpy(), batch.view(-1)[:3]))
        note(workers, kept)


@program
def collating_by_hand(loader: Any, note: Note) -> None:
    def padded(samples: list[torch.Tensor]) -> Any:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(s) for s in samples])

    def packed(samples: list[torch.Tensor]) -> Any:
        return torch.nn.utils.rnn.pack_sequence(samples, enforce_sorted=False)

    def both(samples: list[torch.Tensor]) -> Any:
        return {"list": samples, "first": default_collate(samples[:1])}

    rows = [numbered(k, 1 + k * 7 % 5) for k in range(8)]
    for collate in (padded, packed, both, torch.cat):
        read(loader, note, rows, 3, collate_fn=collate)


if __name__ == "__main__":
    run()
