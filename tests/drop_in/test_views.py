"""Arrays and tensors that are views of one memory are views of one memory in workers, and are sent once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import headrace as hr
from headrace.torch_compat import serialize

COUNT = 8


def sent_bytes(value: Any) -> int:
    """How many bytes of memory go to workers, the pickle itself left out."""
    descriptors: list[int] = []
    _, _, *memory = serialize.pack_for_workers(value, descriptors)
    assert not descriptors
    return sum(map(len, memory))


class Views(Dataset[list[int]]):
    def __init__(self) -> None:
        self.base = np.zeros(COUNT, np.int64)
        self.rows, self.tensor = self.base[:6], torch.from_numpy(self.base)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[int]:
        self.rows[0], self.tensor[7] = 5, 7
        return [*self.base.tolist(), *self.tensor.tolist()]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_what_a_worker_writes_through_one_view_is_seen_through_the_others(kind: Any) -> None:
    data = Views()
    with hr.DataLoader(data, batch_size=None, num_workers=1, workers=kind) as loader:
        assert list(loader) == [[5, 0, 0, 0, 0, 0, 0, 7] * 2]
    if kind == "process":
        assert not data.base.any(), "the trainer's own"


def base() -> Any:
    return np.arange(24, dtype=np.int64).reshape(4, 6)


def structured() -> Any:
    return np.zeros(4, np.dtype([("flag", "u1"), ("value", "<i8")]))


def as_array(view: Any) -> Any:
    """An array over the memory of whatever has some."""
    if isinstance(view, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(view).numpy()
    if isinstance(view, torch.Tensor):
        return (view.detach().view(torch.int16) if view.dtype == torch.bfloat16 else view.detach()).numpy()
    return np.asarray(view)


def address_of(view: Any) -> int:
    return int(as_array(view).__array_interface__["data"][0])


VIEWS: dict[str, Callable[[], Any]] = {
    "rows": lambda: (array := base(), array[1:3]),
    "column": lambda: (array := base(), array[:, 1]),
    "backwards": lambda: (array := base(), array[::-1, ::2]),
    "transposed": lambda: (array := base(), array.T),
    "other dtype": lambda: (array := base(), array.view(np.uint8)),
    "class": lambda: (array := base(), array.view(np.matrix)),
    "field": lambda: (array := structured(), array["value"]),
    "records": lambda: (array := structured(), array.view(np.recarray)),
    "tensor": lambda: (array := base(), torch.from_numpy(array)),
    "column of tensor": lambda: (array := base(), torch.from_numpy(array)[:, 3]),
    "parameter": lambda: (array := base(), torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)),
    "part of tensor": lambda: (tensor := torch.zeros(4, 6), tensor[1:, ::2]),
    "transposed tensor": lambda: (tensor := torch.zeros(4, 6), tensor.t()),
    "bfloat16": lambda: (tensor := torch.zeros(4, 6, dtype=torch.bfloat16), tensor[:, 1]),
    "storage": lambda: (tensor := torch.zeros(4, 6), tensor.untyped_storage()),
    "ctypes": lambda: (array := (ctypes.c_int * 8)(), np.ctypeslib.as_array(array)),
    "repeated": lambda: (array := base(), np.broadcast_to(array[0], (3, 6))),
    "windows": lambda: (array := base(), np.lib.stride_tricks.sliding_window_view(array[0], 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_view_is_one_of_the_same_memory_in_a_worker_and_is_not_sent_twice(views: Callable[[], Any]) -> None:
    given = views()
    there = serialize.copied(given)
    assert [type(view) for view in there] == [type(view) for view in given]
    arrays, arrays_there = [as_array(view) for view in given], [as_array(view) for view in there]
    assert [one.tolist() for one in arrays_there] == [one.tolist() for one in arrays]
    assert [one.dtype for one in arrays_there] == [one.dtype for one in arrays]
    assert address_of(there[1]) - address_of(there[0]) == address_of(given[1]) - address_of(given[0])
    assert sent_bytes(given) == arrays[0].nbytes


def test_view_that_repeats_its_elements_is_sent_once_and_repeats_them_there() -> None:
    tensor, array = torch.full((1,), 3.0).expand(10**9), np.broadcast_to(np.float32(3), 10**9)
    assert sent_bytes((tensor, array)) == 8
    there = serialize.copied((tensor, array))
    assert [(view.shape, float(view[-1])) for view in there] == [((10**9,), 3.0)] * 2


def test_gaps_are_not_sent_when_nothing_else_has_bytes_in_them() -> None:
    wide, tensor = np.arange(10**6).reshape(1000, 1000), torch.arange(10**6).view(1000, 1000)
    views = wide[:, 1], wide[:, 5], tensor[::2, 7]
    assert sent_bytes(views) == 8 * (1000 + 1000 + 500)
    assert [view.tolist() for view in serialize.copied(views)] == [view.tolist() for view in views]


def test_memory_is_sent_whole_when_views_with_gaps_have_bytes_in_common() -> None:
    wide = np.arange(10**4).reshape(100, 100)
    one, other = serialize.copied((wide[:, 1], wide[::2, 1:4]))
    other[0, 0] = -1
    assert one.tolist() == [-1, *wide[1:, 1].tolist()]


def test_arrays_with_gaps_whose_class_pickles_them_leave_others_as_they_are() -> None:
    """What was known of their buffers is not taken for the buffers of others, which may lie where those have lain."""
    given = [one for k in range(200) for one in (np.ma.MaskedArray(np.arange(9) + k)[::2], np.arange(5) + k)]
    assert [one.tolist() for one in serialize.copied(given)] == [one.tolist() for one in given]


def test_view_that_may_not_be_written_may_not_be_there_when_another_may() -> None:
    array = base()
    closed = array[::2]
    closed.flags.writeable = False
    there, closed_there = serialize.copied((array, closed))
    assert (there.flags.writeable, closed_there.flags.writeable) == (True, False)
    there[0, 0] = 9
    assert closed_there[0, 0] == 9


def test_same_views_are_the_same_bytes_wherever_they_lie() -> None:
    """Else functions would be sent anew for each epoch."""

    def packed() -> list[bytes]:
        array = base()
        # temporary copies, and things that lie before or behind each other as it happens
        return [bytes(part) for part in serialize.pack_for_workers((base(), array[:, 1], array[1], base()), [])]

    first = packed()
    kept = [base() for _ in range(50)]
    assert packed() == first
    assert kept
