"""Fields of many samples at once: the same values as one by one, or none."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.sample_ranges import Rows
from headrace.errors import HeadraceError
from headrace.formats.columns import ColumnDecoder
from headrace.formats.decoders import decoder
from headrace.ops.select import ToTuple
from headrace.torch_compat.collate import plain_collate
from headrace.torch_compat.slots import Slots
from headrace.torch_compat.spec import Spec
from headrace.workers.task_inputs import LeasedBodies


def npy(array):
    body = io.BytesIO()
    np.save(body, array)
    return body.getvalue()


def laid_out(samples, cuts=()):
    fields = list(dict.fromkeys(name for sample in samples for name in sample))
    data, starts, field, offset, size = bytearray(b"some bytes before"), [0], [], [], []
    for sample in samples:
        for name, body in sample.items():
            field.append(fields.index(name))
            offset.append(len(data))
            size.append(len(body))
            data += body + b"padding"
        starts.append(len(field))
    keys = np.array([b"%04d" % k for k in range(len(samples))])
    ints = [np.array(values, np.int64) for values in (starts, offset, size)]
    rows = Rows(keys, ints[0], np.array(field, np.int32), ints[1], ints[2], tuple(fields))
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)} | {len(data)})
    first = [0, *ends[:-1]]
    views = [memoryview(bytes(data[a:b])) for a, b in zip(first, ends, strict=True)]
    return rows, LeasedBodies(views, first)


def one_by_one(samples, decode, names):
    return [ToTuple(names)(decode({"__key__": str(k), **sample})) for k, sample in enumerate(samples)]


def at_once(rows, bodies, decode, names, like):
    """The batch that is made of columns; None where there are none, or of another form than `like`."""
    columns = ColumnDecoder(decode, names)(rows, bodies)
    spec = Spec.of(like)
    if columns is None or spec is None:
        return None
    slab = memoryview(bytearray(spec.nbytes(len(rows) + 3)))
    slots = Slots(spec, slab, 2, len(rows) + 3)
    if not slots.fill_columns(columns, bodies, len(rows)):
        return None
    whole = spec.read(np.frombuffer(slab, np.uint8), len(rows) + 2, len(rows) + 3, (), copy=True)
    return [leaf[2:] for leaf in whole]


arrays = st.builds(
    lambda dtype, shape, order: npy(np.asarray(np.arange(np.prod(shape)).reshape(shape), dtype, order=order)),
    st.sampled_from(["<f4", ">f4", "u1", "i8", "?", "c8", "U3"]),
    st.sampled_from([(), (1,), (3,), (2, 3), (0,), (4, 0)]),
    st.sampled_from("CF"),
)
numbers = st.one_of(
    st.integers(-5, 10**20).map(lambda n: b"%d" % n),
    st.sampled_from([b"", b" 7", b"7\n", b"007", b"1_0", b"+3", b"x", b"9" * 18, b"9" * 19, "٣".encode()]),
)
alike = st.tuples(arrays, st.integers(1, 12)).flatmap(
    lambda how: st.lists(
        st.fixed_dictionaries({"npy": st.just(how[0]), "cls": numbers}), min_size=how[1], max_size=how[1]
    )
)
mixed = st.lists(
    st.fixed_dictionaries({}, optional={"npy": arrays, "cls": numbers, "txt": st.binary(max_size=3)}),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@given(
    st.one_of(alike, mixed), st.lists(st.integers(0, 2000), max_size=6), st.sampled_from([("npy", "cls"), ("cls;npy",)])
)
def test_columns_are_what_samples_one_by_one_are_for_any_bytes(samples, cuts, names):
    decode = decoder().only(name for alternatives in names for name in alternatives.split(";"))
    rows, bodies = laid_out(samples, cuts)
    try:
        expected = one_by_one(samples, decode, names)
    except HeadraceError:
        assert ColumnDecoder(decode, names)(rows, bodies) is None  # decoding one sample names the error
        return
    got = at_once(rows, bodies, decode, names, expected[0])
    if got is not None:
        wanted = plain_collate(expected)
        for left, right in zip(got, wanted, strict=True):
            assert left.dtype == right.dtype
            assert left.equal(right) or (left != left).any()


@pytest.mark.parametrize("cuts", [(), (900,), (300, 301, 700, 1500)])
def test_columns_are_there_for_samples_of_one_form(cuts):
    values = np.random.default_rng(0).normal(size=(20, 4, 5)).astype(np.float32)
    samples = [{"npy": npy(value), "cls": b"%d" % (7**k)} for k, value in enumerate(values)]
    rows, bodies = laid_out(samples, cuts)
    arrays, classes = at_once(rows, bodies, decoder(), ("jpg;npy", "cls"), (values[0], 1))
    assert (arrays.numpy() == values).all()
    assert classes.tolist() == [7**k for k in range(20)]


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
