"""Samples in columns: equal to what they were, and put together as they are one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from builders.arrays import npy
from builders.bodies import laid_out
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.decoders import ColumnDecoder, decoder
from headrace.ops.select import ToTuple
from headrace.torch_compat import serialize
from headrace.torch_compat.padded import PaddedCollate
from headrace.torch_compat.sample_table import RowsOfTables, SampleTable

SHAPES = st.integers(1, 2).flatmap(lambda dimensions: st.tuples(*[st.integers(0, 3)] * dimensions))
DTYPES = st.sampled_from(["int64", "float32", "uint8", "bool", ">i4", "complex64"])
NUMBERS = st.lists(st.integers(0, 255), min_size=9, max_size=9)


def array(shape: tuple[int, ...], dtype: str, numbers: Sequence[int]) -> Any:
    return np.resize(np.array(numbers), shape).astype(dtype)


ARRAYS = st.builds(array, SHAPES, DTYPES, NUMBERS)
ALIKE = st.builds(array, st.just((3,)), st.just("int64"), NUMBERS)
TENSORS = st.builds(lambda some: torch.from_numpy(some.real.astype("float32")), ARRAYS)
KINDS = [ALIKE, ALIKE, ARRAYS, TENSORS, st.integers(), st.text(max_size=3), st.booleans(), st.none(), st.floats()]
VALUES = st.sampled_from(KINDS)


@st.composite
def tables(draw: Any) -> list[list[Any]]:
    """The samples of one table or several, which have one form more often than not."""
    kinds = draw(st.lists(VALUES, min_size=1, max_size=3))
    form = draw(st.sampled_from(["dict", "tuple", "value"]))

    def sample() -> Any:
        values = [draw(kind) for kind in kinds]
        if form == "dict":
            return dict(zip("abc", values, strict=False))
        return tuple(values) if form == "tuple" else values[0]

    return [[sample() for _ in range(draw(st.integers(1, 4)))] for _ in range(draw(st.integers(1, 3)))]


def sent(table: SampleTable) -> SampleTable:
    parts = table.packed()
    place = memoryview(bytearray(serialize.packed_size(parts)))
    found: SampleTable = serialize.unpack(place, serialize.write(parts, place), copy=False)
    return found


def described(value: Any) -> Any:
    """A value with all types in it, so that equal ones are the same in all that can be seen."""
    if isinstance(value, dict):
        return dict, [(key, described(one)) for key, one in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [described(one) for one in value]
    if isinstance(value, torch.Tensor | np.ndarray):
        array = np.asarray(value)
        return type(value), array.dtype.str, array.shape, array.tobytes()
    return type(value), repr(value)


def outcome(collate: PaddedCollate, samples: Sequence[Any]) -> Any:
    try:
        return described(collate(samples))
    except Exception as error:
        return type(error), str(error)


def values_of(sample: Any) -> Sequence[Any]:
    return list(sample.values()) if isinstance(sample, dict) else sample if isinstance(sample, tuple) else [sample]


def chosen_of(data: Any, some: list[list[Any]]) -> tuple[list[tuple[SampleTable, list[int]]], list[Any]]:
    """(tables that were sent, with some of their rows; the samples of those rows)."""
    parts, samples = [], []
    for whole in some:
        table = SampleTable.of(whole)
        chosen = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1))
        if table is not None:
            assert described(table.samples()) == described(whole)
            parts.append((sent(table), chosen))
            samples += [whole[k] for k in chosen]
    return parts, samples


@given(some=tables(), data=st.data())
def test_samples_survive_tables_unchanged(some: list[list[Any]], data: Any) -> None:
    parts, expected = chosen_of(data, some)
    if not parts:
        return
    rows = RowsOfTables(parts)
    assert len(rows) == len(expected)
    assert described(list(rows)) == described(expected)
    for sample in rows:  # memory of their own, which may be written to
        for value in values_of(sample):
            if isinstance(value, np.ndarray | torch.Tensor):
                value[...] = 1
    assert described(list(rows)) == described(expected)


@given(some=tables(), data=st.data(), pad=st.sampled_from([0, 7, 0.5, {"a": 1}, {"0": 3}, {"x": 1}]))
def test_samples_of_tables_are_padded_as_single_samples(some: list[list[Any]], data: Any, pad: Any) -> None:
    parts, samples = chosen_of(data, some)
    if parts:
        collate = PaddedCollate(pad)
        assert outcome(collate, RowsOfTables(parts)) == outcome(collate, samples)


@pytest.mark.parametrize("samples", [
    [], [{}], [()], [{"a": 1}, {"b": 1}], [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [(1,), (1, 2)], [(1,), {"a": 1}],
    [([1],)], [np.float32(1)], [np.array(1)], [np.array(["a"])], [np.zeros(2), np.zeros(2, np.int64)],
    [torch.zeros(1, dtype=torch.bfloat16)], [torch.zeros(1, requires_grad=True)],
    [torch.zeros(1, dtype=torch.complex64).conj()], [torch.nn.Parameter(torch.zeros(1), requires_grad=False)],
    [np.ma.masked_array([1])], [np.zeros(2**16)], ["x" * 2**16], [{(1, 2): 1}],
])  # fmt: skip
def test_other_samples_form_no_table(samples: list[Any]) -> None:
    assert SampleTable.of(samples) is None


@given(shape=SHAPES, dtype=DTYPES, count=st.integers(1, 5))
def test_decoded_columns_form_a_table(shape: tuple[int, ...], dtype: str, count: int) -> None:
    samples = [{"npy": npy(array(shape, dtype, range(k, k + 9))), "cls": b"%d" % k} for k in range(count)]
    rows, bodies = laid_out(samples)
    columns = ColumnDecoder(decoder(), ("npy", "cls"))(rows, bodies)
    table = None if columns is None else SampleTable.of_columns(columns, bodies, count)
    if table is None:
        assert 0 in shape or dtype == ">i4"
        return
    expected = [ToTuple(("npy", "cls"))(decoder()({"__key__": str(k), **sample})) for k, sample in enumerate(samples)]
    assert described(table.samples()) == described(expected)


def test_no_columns_if_an_unused_field_could_fail_to_decode() -> None:
    rows, bodies = laid_out([{"cls": b"7", "npy": b"no array"}] * 3)
    assert ColumnDecoder(decoder(), ("cls;npy",))(rows, bodies) is None
    assert ColumnDecoder(decoder(), ("cls;jpg",))(rows, bodies) is not None
