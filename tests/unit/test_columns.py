"""Columns of many samples in slots. `full/fuzz/columns.py` compares them with samples one by one."""

import numpy as np
import pytest
from builders.arrays import npy
from builders.bodies import laid_out
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.decoders import ColumnDecoder, decoder
from headrace.torch_compat.spec import Slots, Spec


@pytest.mark.parametrize("dtype", ["f4", "u1", "i8", "?", "c8"])
@pytest.mark.parametrize("cuts", [(), (900,), (300, 301, 700, 1500)])
def test_columns_fill_slots_for_samples_of_one_form(dtype, cuts):
    values = (np.random.default_rng(0).normal(size=(20, 4, 5)) * 50).astype("i1").astype(dtype)
    samples = [{"npy": npy(value), "cls": b"%d" % (7**k)} for k, value in enumerate(values)]
    rows, bodies = laid_out(samples, cuts)
    columns, spec = ColumnDecoder(decoder(), ("jpg;npy", "cls"))(rows, bodies), Spec.of((values[0], 1))
    slab = memoryview(bytearray(spec.nbytes(23)))
    assert Slots(spec, slab, 2, 23).fill_columns(columns, bodies, 20)
    arrays, classes = spec.read(np.frombuffer(slab, np.uint8), 22, 23, (), copy=True)
    assert arrays.numpy().dtype == values.dtype
    assert (arrays[2:].numpy() == values).all()
    assert classes[2:].tolist() == [7**k for k in range(20)]


def test_no_columns_if_an_unused_field_could_fail_to_decode():
    rows, bodies = laid_out([{"cls": b"7", "npy": b"no array"}] * 3)
    assert ColumnDecoder(decoder(), ("cls;npy",))(rows, bodies) is None
    assert ColumnDecoder(decoder(), ("cls;jpg",))(rows, bodies) is not None


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=10),
    st.lists(st.integers(1, 400), max_size=8),
    st.integers(0, 40),
)
def test_gathered_bodies_equal_single_bodies(members, cuts, length):
    rows, bodies = laid_out([{"bin": body} for body in members], cuts)
    chosen = rows.offset[rows.size >= length]
    gathered = bodies.gather(chosen, length)
    assert [row.tobytes() for row in gathered] == [bodies.one(offset, length) for offset in chosen.tolist()]
    assert [bodies.one(o, s) for o, s in zip(rows.offset.tolist(), rows.size.tolist(), strict=True)] == members
