"""Columns of many samples in slots. `full/fuzz/columns.py` compares them with samples one by one."""

import io

import numpy as np
import pytest
from builders.rows import rows_of
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.columns import ColumnDecoder
from headrace.formats.decoders import decoder
from headrace.torch_compat.slots import Slots
from headrace.torch_compat.spec import Spec
from headrace.workers.task_inputs import LeasedBodies


def npy(array):
    body = io.BytesIO()
    np.save(body, array)
    return body.getvalue()


def laid_out(samples, cuts=()):
    data, plain = bytearray(b"some bytes before"), []
    for k, sample in enumerate(samples):
        members = []
        for name, body in sample.items():
            members.append((name, len(data), len(body)))
            data += body + b"padding"
        plain.append((b"%04d" % k, members))
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)} | {len(data)})
    first = [0, *ends[:-1]]
    views = [memoryview(bytes(data[a:b])) for a, b in zip(first, ends, strict=True)]
    return rows_of(plain), LeasedBodies(views, first)


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


def test_columns_are_none_when_a_field_that_is_not_taken_could_fail_to_decode():
    rows, bodies = laid_out([{"cls": b"7", "npy": b"no array"}] * 3)
    assert ColumnDecoder(decoder(), ("cls;npy",))(rows, bodies) is None
    assert ColumnDecoder(decoder(), ("cls;jpg",))(rows, bodies) is not None


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=10),
    st.lists(st.integers(1, 400), max_size=8),
    st.integers(0, 40),
)
def test_bodies_gathered_are_those_taken_one_by_one(members, cuts, length):
    rows, bodies = laid_out([{"bin": body} for body in members], cuts)
    chosen = rows.offset[rows.size >= length]
    gathered = bodies.gather(chosen, length)
    assert [row.tobytes() for row in gathered] == [bodies.one(offset, length) for offset in chosen.tolist()]
    assert [bodies.one(o, s) for o, s in zip(rows.offset.tolist(), rows.size.tolist(), strict=True)] == members
