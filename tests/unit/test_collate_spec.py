"""Batches from slots equal torch's default_collate: values, types, dtypes, order."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from headrace.testing.decoders import same
from headrace.torch_compat.spec import Mismatch, Spec, name_of


class Pair(NamedTuple):
    left: Any
    right: Any


TORCH_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
NUMPY_DTYPES = ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", ">f4", ">i8"]
SCALARS = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int8, np.uint8, np.uint16, np.bool_, np.complex64]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)

Draw = Callable[[int], Any]
Chunks = Sequence[tuple[int, int]]
"""Numbers of samples, and of empty slots after them."""


def torch_tensor(dtype: torch.dtype, shape: tuple[int, ...], turned: bool) -> Draw:
    def make(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        source = tuple(reversed(shape)) if turned else shape
        tensor = (torch.randn(source, generator=generator) * 50).to(dtype)
        return tensor.permute(tuple(reversed(range(len(shape))))) if turned else tensor

    return make


def numpy_array(dtype: str, shape: tuple[int, ...], way: str) -> Draw:
    def make(number: int) -> np.ndarray:
        generator = np.random.default_rng(number)
        array = np.asarray((generator.standard_normal(shape) * 50).astype("u1").astype(dtype))
        if way == "negative" and shape:
            array = array[::-1]
        elif way == "transposed":
            array = np.asfortranarray(array)
        elif way == "strided" and shape:
            array = np.repeat(array, 2, axis=0)[::2]
        elif way == "read-only":
            array.flags.writeable = False
        return array

    return make


def leaf_makers() -> st.SearchStrategy[Draw]:
    ways = ["plain", "negative", "transposed", "strided", "read-only"]
    return st.one_of(
        st.builds(torch_tensor, st.sampled_from(TORCH_DTYPES), SHAPES, st.booleans()),
        st.builds(numpy_array, st.sampled_from(NUMPY_DTYPES), SHAPES, st.sampled_from(ways)),
        st.sampled_from(SCALARS).map(lambda kind: lambda number: kind(number % 100)),
        st.just(lambda number: number * 10**9 - 5),
        st.just(lambda number: number / 7),
        st.just(lambda number: number % 2 == 0),
        st.just(lambda number: f"text {number}"),
        st.just(lambda number: b"bytes %d" % number),
        st.just(lambda number: float("nan") if number % 2 else float("-inf")),
    )


def containers(inner: st.SearchStrategy[Draw]) -> st.SearchStrategy[Draw]:
    several = st.lists(inner, max_size=3)
    names = st.lists(st.one_of(st.text(max_size=3), st.integers(0, 5)), max_size=3, unique=True)
    return st.one_of(
        several.map(lambda makers: lambda number: [make(number) for make in makers]),
        several.map(lambda makers: lambda number: tuple(make(number) for make in makers)),
        st.tuples(inner, inner).map(lambda makers: lambda number: Pair(*(make(number) for make in makers))),
        st.tuples(names, st.lists(inner, min_size=3, max_size=3)).map(
            lambda both: lambda number: {name: make(number) for name, make in zip(both[0], both[1], strict=False)}
        ),
    )


def samples_of() -> st.SearchStrategy[Draw]:
    return st.recursive(leaf_makers(), containers, max_leaves=5)


def spec_and_slab(sample: Any, slots: int) -> tuple[Spec, np.ndarray]:
    spec = Spec.of(sample)
    assert spec is not None
    spec = Spec.loads(spec.dumps())
    return spec, np.full(spec.nbytes(slots), 0xA5, np.uint8)


def through_slab(samples: list[Any], chunks: Chunks, extra: int = 0, *, copy: bool) -> Any:
    """The batch by way of a slab with `extra` slots.

    Each chunk that is written has some samples, and empty slots for those that failed.
    """
    slots = sum(map(sum, chunks))
    spec, slab = spec_and_slab(samples[0], slots + extra)
    assert all(spec.fits(sample) for sample in samples)
    columns: list[list[Any]] = [[] for leaf in spec.leaves if leaf.dtype is None]
    holes, slot, done = list[int](), 0, 0
    for count, missing in chunks:
        if count:
            wrote = spec.write(samples[done : done + count], memoryview(slab), slot, slots + extra)
            columns = [a + b for a, b in zip(columns, wrote, strict=True)]
        holes += range(slot + count, slot + count + missing)
        slot, done = slot + count + missing, done + count
    return spec.read(slab, slots, slots + extra, columns, copy=copy, holes=holes)


def assert_same(got: Any, wanted: Any) -> None:
    assert same(got, wanted), (got, wanted)
    for tensor in tree_leaves(got):
        if isinstance(tensor, torch.Tensor):
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def forward(leaf: Any) -> Any:
    """Copy an array with negative strides: torch does not take those."""
    return leaf.copy() if isinstance(leaf, np.ndarray) and min(leaf.strides, default=0) < 0 else leaf


def collated(samples: list[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only arrays
        try:
            return default_collate(tree_map(forward, samples))
        except Exception as error:
            return error


CHUNKS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4).filter(
    lambda chunks: any(count for count, _ in chunks)
)


@pytest.mark.slow
@settings(max_examples=600)
@given(make=samples_of(), chunks=CHUNKS, has_holes=st.booleans(), extra=st.integers(0, 3), copy=st.booleans())
def test_batches_from_slots_equal_torchs_collation(
    make: Draw, chunks: Chunks, has_holes: bool, extra: int, copy: bool
) -> None:
    chunks = [(count, missing * has_holes) for count, missing in chunks]
    samples = [make(number) for number in range(sum(count for count, _ in chunks))]
    if Spec.of(samples[0]) is None:
        return  # torch's business, errors included
    wanted = collated(samples)
    assert not isinstance(wanted, Exception), wanted
    assert_same(through_slab(samples, chunks, extra, copy=copy), wanted)


@pytest.mark.slow
@settings(max_examples=300)
@given(first=samples_of(), second=samples_of())
def test_sample_of_another_form_is_detected_or_collated_as_by_torch(first: Draw, second: Draw) -> None:
    samples = [first(0), second(1)]
    if Spec.of(samples[0]) is None:
        return
    spec, slab = spec_and_slab(samples[0], 2)
    try:
        columns = spec.write(samples, memoryview(slab), 0, 2)
    except Mismatch:
        return
    wanted = collated(samples)
    assert not isinstance(wanted, Exception), (samples, wanted)
    assert_same(spec.read(slab, 2, 2, columns, copy=True), wanted)


ODD_PAIRS = {
    "int then float": (1, 1.5),
    "float then int": (1.5, 1),
    "bool then int": (True, 2),
    "int then bool": (2, True),
    "numpy scalar then float": (np.float64(1), 1.5),
    "float then numpy scalar": (1.5, np.float64(1)),
    "float32 then float64 tensor": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "float32 then float64 array": (np.zeros(2, "f4"), np.zeros(2, "f8")),
    "little then big endian": (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
    "array then tensor": (np.zeros(2, "f4"), torch.zeros(2)),
    "another shape": (torch.zeros(2), torch.zeros(3)),
    "another shape of as many": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "another rank": (torch.zeros(1), torch.zeros(())),
    "missing key": ({"a": 1, "b": 2}, {"a": 1}),
    "one key more": ({"a": 1}, {"a": 1, "b": 2}),
    "other key": ({"a": 1}, {"b": 1}),
    "other order of keys": ({"a": 1, "b": 2.0}, {"b": 2.0, "a": 1}),
    "ordered dict": ({"a": 1}, OrderedDict(a=1)),
    "longer list": ([1], [1, 2]),
    "tuple then list": ((1, 2), [1, 2]),
    "tuple then named tuple": ((1, 2), Pair(1, 2)),
    "string then bytes": ("a", b"a"),
    "string then number": ("a", 1),
    "big int": (1, 2**63),
    "very negative int": (1, -(2**63) - 1),
    "requires grad": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "parameter": (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
    "sparse": (torch.zeros(2), torch.zeros(2).to_sparse()),
    "none": (1, None),
}


@pytest.mark.parametrize("pair", ODD_PAIRS.values(), ids=ODD_PAIRS.keys())
def test_samples_of_two_forms_are_left_to_torch(pair: tuple[Any, Any]) -> None:
    spec, slab = spec_and_slab(pair[0], 2)
    with pytest.raises(Mismatch):
        spec.write(pair, memoryview(slab), 0, 2)


@pytest.mark.parametrize("sample", [
    None, object(), {"a": None}, OrderedDict(a=1), torch.zeros(2, requires_grad=True), torch.zeros(2).to_sparse(),
    np.array(["a"]), np.array([object()]), np.zeros(2, ">f4"), np.zeros(2, "M8[s]"), np.float64(1).astype("c16"),
    type("MyInt", (int,), {})(3),
])  # fmt: skip
def test_forms_that_slots_cannot_hold_have_no_spec(sample: Any) -> None:
    assert Spec.of(sample) is None


def test_large_tensors_are_views_and_small_ones_are_copies() -> None:
    samples = [{"image": torch.full((3, 64, 64), float(k)), "label": k} for k in range(4)]
    spec, slab = spec_and_slab(samples[0], 4)
    batch = spec.read(slab, 4, 4, spec.write(samples, memoryview(slab), 0, 4), copy=False)
    slab[:] = 0
    assert batch["image"].eq(0).all()
    assert batch["label"].tolist() == [0, 1, 2, 3]


def test_large_leaves_equal_torchs_too() -> None:
    samples = [(torch.randn(3, 90, 91), np.random.default_rng(k).standard_normal((70, 200)), k) for k in range(3)]
    assert_same(through_slab(samples, [(1, 0), (2, 0)], 2, copy=False), default_collate(samples))
    turned = [(torch.randn(90, 3, 91).permute(1, 0, 2), np.ones((70, 200))[::-1], k) for k in range(3)]
    assert_same(
        through_slab(turned, [(2, 0), (1, 0)], copy=True), default_collate([(a, b.copy(), c) for a, b, c in turned])
    )


def test_write_changes_its_own_slots_only() -> None:
    samples = [(torch.full((5,), 1.0), k) for k in range(2)]
    spec, slab = spec_and_slab(samples[0], 6)
    spec.write(samples, memoryview(slab), 2, 6)
    image = slab[: 6 * 20].reshape(6, 20)
    assert (image[[0, 1, 4, 5]] == 0xA5).all()
    assert not (image[2:4] == 0xA5).all()
    assert (slab[120:128] == 0xA5).all()
    assert (slab[128:144] == 0xA5).all()
    assert slab[144:160].view(np.int64).tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["=", "<", ">"])
@pytest.mark.parametrize("code", [*np.typecodes["All"], "S3", "U2", "V5"])
def test_dtypes_have_torchs_names_where_torch_takes_their_arrays(code: str, order: str) -> None:
    dtype = np.dtype(code).newbyteorder(order)
    try:
        expected = str(torch.from_numpy(np.empty(0, dtype)).dtype).removeprefix("torch.")
    except (TypeError, ValueError):
        with pytest.raises(Mismatch):
            name_of(dtype)
    else:
        assert name_of(dtype) == expected
        assert getattr(torch, expected).itemsize == dtype.itemsize
