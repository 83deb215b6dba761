"""Collation of arrays that differ in length."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from headrace.errors import CollateError
from headrace.torch_compat.padded import PaddedCollate

SHAPES = st.integers(1, 3).flatmap(
    lambda dimensions: st.lists(st.tuples(*[st.integers(0, 4)] * dimensions), min_size=1, max_size=5)
)
DTYPES = ("int64", "float32", "uint8", "int16", "bool", "bfloat16")


@given(shapes=SHAPES, dtype=st.sampled_from(DTYPES), pad=st.sampled_from([0, 1]))
def test_padded_batch_has_each_array_and_padding(shapes: list[tuple[int, ...]], dtype: str, pad: int) -> None:
    made = [torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype)) for shape in shapes]
    arrays: list[Any] = made if dtype == "bfloat16" else [array.numpy() for array in made]
    for values in (made, arrays):
        batch = PaddedCollate(pad)(values)
        assert isinstance(batch, torch.Tensor)
        assert batch.dtype == made[0].dtype
        assert batch.shape == (len(shapes), *map(max, zip(*shapes, strict=True)))
        left = torch.ones(batch.shape, dtype=torch.bool)
        for k, array in enumerate(made):
            inside = (k, *map(slice, array.shape))
            assert torch.equal(batch[inside], array)
            left[inside] = False
        assert (batch[left] == torch.tensor(pad).to(batch.dtype)).all()


@given(shapes=SHAPES, is_even=st.booleans())
def test_reversed_arrays_are_padded_as_others(shapes: list[tuple[int, ...]], is_even: bool) -> None:
    shapes = shapes[:1] * len(shapes) if is_even else shapes
    arrays = [np.arange(int(np.prod(shape))).reshape(shape)[::-1] for shape in shapes]
    assert torch.equal(PaddedCollate()(arrays), PaddedCollate()([array.copy() for array in arrays]))


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=5), min_size=1, max_size=5))
def test_lists_of_numbers_are_arrays_whatever_is_empty(lists: list[list[int]]) -> None:
    batch = PaddedCollate(-1)(lists)
    longest = max(map(len, lists))
    expected = [[*numbers, *[-1] * (longest - len(numbers))] for numbers in lists]
    assert torch.equal(batch, torch.tensor(expected, dtype=torch.int64).reshape(len(lists), longest))  # type: ignore[arg-type]


class Pair(NamedTuple):
    ids: list[int]
    name: str


@pytest.mark.parametrize("samples", [
    [{"x": np.ones(3), "y": 1, "z": "a"}, {"x": np.zeros(3), "y": 2, "z": "b"}],
    [(np.ones(3), 1.5), (np.zeros(3), 2.5)],
    [Pair([1], "a"), Pair([2], "b")],
    ["a", "b"],
    [1, 2],
    [{"inner": {"t": torch.ones(2, 2)}}, {"inner": {"t": torch.zeros(2, 2)}}],
    [b"a", b"b"],
    [np.float32(1), np.float32(2)],
    [["a", "b"], ["c", "d"]],
])  # fmt: skip
def test_values_of_equal_length_are_collated_as_by_default(samples: list[Any]) -> None:
    made, expected = PaddedCollate()(samples), default_collate(samples)
    assert type(made) is type(expected)
    if isinstance(samples[0], Pair):  # lists of numbers are arrays here
        expected = Pair(torch.tensor([[1], [2]]), ["a", "b"])  # type: ignore[arg-type]
    torch.testing.assert_close(_numbers(made), _numbers(expected), rtol=0, atol=0)


def _numbers(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _numbers(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_numbers(value) for value in batch]
    return batch if isinstance(batch, torch.Tensor) else int.from_bytes(str(batch).encode(), "little")


def test_fields_have_padding_of_their_own() -> None:
    samples = [
        {"ids": [1, 2], "labels": np.array([3, 4]), "n": {"deep": [5]}},
        {"ids": [], "labels": np.array([6]), "n": {"deep": []}},
    ]
    batch: Any = PaddedCollate({"labels": -100, "deep": 9})(samples)
    assert batch["ids"].tolist() == [[1, 2], [0, 0]]
    assert batch["labels"].tolist() == [[3, 4], [6, -100]]
    assert batch["n"]["deep"].tolist() == [[5], [9]]
    pairs: Any = PaddedCollate({"1": 7})([([1], [2, 3]), ([4, 5], [6])])
    assert [one.tolist() for one in pairs] == [[[1, 0], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(("pad", "samples", "match"), [
    ({"idz": 1}, [{"ids": [1]}], r"pad_value names 'idz', and samples have 'ids'"),
    ({"x": 1}, [[1]], r"pad_value names 'x', and samples have no fields"),
    (-1, [np.zeros(1, np.uint8), np.zeros(2, np.uint8)], r"pad_value=-1 .* uint8: they cannot hold it"),
    (256, [torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)], "cannot hold it"),
    (0.5, [{"x": [1]}, {"x": [1, 2]}], r"pad_value=0.5 for the samples' fields 'x'.* int64: they cannot hold it"),
    (float("nan"), [np.zeros(1, np.int32), np.zeros(2, np.int32)], "cannot hold it"),
    (-1e9, [np.zeros(1, np.float16), np.zeros(2, np.float16)], r"pad_value=-1000000000.0 .* float16: they cannot"),
    (1e39, [torch.zeros(1), torch.zeros(2)], "cannot hold it"),
    (2, [np.zeros(1, bool), np.zeros(2, bool)], "cannot hold it"),
    (0, [np.zeros(1, np.int32), np.zeros(2, np.int64)], r"are of int32, int64: one dtype is needed"),
    (0, [np.zeros(1, np.int32), np.zeros(1, np.float32)], r"are of float32, int32: one dtype is needed"),
    (0, [np.zeros(1), np.zeros((1, 1))], r"the shapes .*: as many dimensions are needed"),
    (0, [{"x": [1]}, {"x": "a"}], r"the samples' fields 'x' of a batch are list, str: arrays, tensors or lists in"),
    (0, [{"x": 1}, {"x": [1]}], r"are int, list: arrays, tensors or lists in all of them are needed"),
    (0, [[1, 2], np.zeros(1, np.uint64)], r"are of int64, uint64: one dtype is needed"),
    (0, [([1], 2), ([1],)], "are tuples of several lengths: one is needed"),
    (0, [np.zeros(1, ">i4"), np.zeros(2, ">i4")], "byte order"),
    (0, [{"ids": [1]}, {"n": 1}], r"sample 1 .* 'n'"),
])  # fmt: skip
def test_values_that_cannot_be_padded_are_an_error_with_the_reason(pad: Any, samples: list[Any], match: str) -> None:
    with pytest.raises((ValueError, CollateError), match=match):
        PaddedCollate(pad)(samples)


@pytest.mark.parametrize("samples", [[[2**63], [1, 2]], [[2**63 + 1, 1]], [[2**63], [2**63, 2**63]], [[2**64], [-1]]])
def test_integers_beyond_int64_do_not_become_floats(samples: list[Any]) -> None:
    with pytest.raises(OverflowError, match=r"a list has the whole number \d+, which int64 cannot"):
        PaddedCollate()(samples)
    arrays: Any = PaddedCollate()([np.array(one, np.uint64) for one in ([2**63 + 1], [1, 2])])
    assert arrays.tolist() == [[2**63 + 1, 0], [1, 2]]
    assert PaddedCollate()([[2.0**70], [float("inf"), 1]]).shape == (2, 2)  # type: ignore[attr-defined]


def test_arrays_tensors_and_lists_of_a_field_are_padded_together() -> None:
    some: list[Any] = [torch.tensor([1, 2]), np.array([3]), [4, 5, 6]]
    expected = [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2], [0, 2]):
        batch: Any = PaddedCollate()([{"x": some[k]} for k in order])
        assert batch["x"].tolist() == [expected[k] for k in order]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
def test_infinity_is_a_number_to_pad_with(dtype: type) -> None:
    batch: Any = PaddedCollate(float("-inf"))([np.zeros(1, dtype), np.zeros(2, dtype)])
    assert torch.isinf(batch).tolist() == [[False, True], [False, False]]
