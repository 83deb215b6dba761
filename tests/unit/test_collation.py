"""Batches from slots, from tables and of padded arrays equal torch's default_collate."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from builders.numbers import npy
from builders.rows import laid_out
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from headrace.delivery.device import rebuilt
from headrace.errors import CollateError
from headrace.formats.decoders import ColumnDecoder, decoder
from headrace.ops.select import ToTuple
from headrace.testing.decoders import same
from headrace.torch_compat import serialize
from headrace.torch_compat.padded import PaddedCollate
from headrace.torch_compat.sample_table import RowsOfTables, SampleTable
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


UNEVEN_SHAPES = st.integers(1, 3).flatmap(
    lambda dimensions: st.lists(st.tuples(*[st.integers(0, 4)] * dimensions), min_size=1, max_size=5)
)
PADDED_DTYPES = ("int64", "float32", "uint8", "int16", "bool", "bfloat16")


@given(shapes=UNEVEN_SHAPES, is_even=st.booleans(), dtype=st.sampled_from(PADDED_DTYPES), pad=st.sampled_from([0, 1]))
def test_padded_batch_has_each_array_and_padding(
    shapes: list[tuple[int, ...]], is_even: bool, dtype: str, pad: int
) -> None:
    shapes = shapes[:1] * len(shapes) if is_even else shapes
    made = [torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype)) for shape in shapes]
    arrays: list[Any] = made if dtype == "bfloat16" else [array.numpy() for array in made]
    backwards = [np.flip(np.flip(array).copy()) for array in arrays if isinstance(array, np.ndarray)]
    for values in (made, arrays, backwards or arrays):
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


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=5), min_size=1, max_size=5))
def test_lists_of_numbers_are_arrays_whatever_is_empty(lists: list[list[int]]) -> None:
    batch = PaddedCollate(-1)(lists)
    longest = max(map(len, lists))
    expected = [[*numbers, *[-1] * (longest - len(numbers))] for numbers in lists]
    assert torch.equal(batch, torch.tensor(expected, dtype=torch.int64).reshape(len(lists), longest))  # type: ignore[arg-type]


class IdsAndName(NamedTuple):
    ids: list[int]
    name: str


@pytest.mark.parametrize("samples", [
    [{"x": np.ones(3), "y": 1, "z": "a"}, {"x": np.zeros(3), "y": 2, "z": "b"}],
    [(np.ones(3), 1.5), (np.zeros(3), 2.5)],
    [IdsAndName([1], "a"), IdsAndName([2], "b")],
    ["a", "b"],
    [1, 2],
    [{"inner": {"t": torch.ones(2, 2)}}, {"inner": {"t": torch.zeros(2, 2)}}],
    [b"a", b"b"],
    [np.float32(1), np.float32(2)],
    [["a", "b"], ["c", "d"]],
])  # fmt: skip
def test_values_of_equal_length_are_collated_as_by_default(samples: list[Any]) -> None:
    made, expected = PaddedCollate()(samples), default_collate(samples)
    if isinstance(samples[0], IdsAndName):  # lists of numbers are arrays here
        expected = IdsAndName(torch.tensor([[1], [2]]), ("a", "b"))  # type: ignore[arg-type]
    assert same(made, expected)


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


@dataclass(frozen=True)
class Leaf:
    """A value that torch pins by its own method, so that its function needs no accelerator here."""

    number: int
    is_changed: bool = False

    def pin_memory(self) -> Leaf:
        return Leaf(self.number, is_changed=True)


class Named(dict[str, Any]):
    def __init__(self, name: str, **values: Any) -> None:
        super().__init__(values)
        self.name = name


class FixedMapping(Mapping[str, Any]):
    """A mapping that cannot be made of a dict."""

    def __init__(self, first: Any, second: Any) -> None:
        self._parts = {"first": first, "second": second}

    def __getitem__(self, key: str) -> Any:
        return self._parts[key]

    def __iter__(self) -> Any:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


BATCHES = {
    "leaf": Leaf(1),
    "dict": {"a": Leaf(1), 2: [Leaf(2)]},
    "ordered": OrderedDict(b=Leaf(1), a=Leaf(2)),
    "dict with attributes": Named("of the user's", x=Leaf(1)),
    "user dict": UserDict(a=Leaf(1)),
    "proxy": MappingProxyType({"a": Leaf(1)}),
    "fixed mapping": FixedMapping(Leaf(1), Leaf(2)),
    "list": [Leaf(1), "text", b"bytes", None, 3, [], {}],
    "user list": UserList([Leaf(1)]),
    "tuple": (Leaf(1), (Leaf(2),)),
    "named tuple": Pair(Leaf(1), [Leaf(2)]),
    "range": range(3),
    "text": "text",
    "other": 1.5,
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batch_is_rebuilt_as_torch_pins_it(batch: Any) -> None:
    ours = rebuilt(batch, lambda value: isinstance(value, Leaf), Leaf.pin_memory)
    torchs = pin_memory(batch)
    assert type(ours) is type(torchs)
    assert ours == torchs
    assert vars(ours) == vars(torchs) if hasattr(torchs, "__dict__") else True


def test_original_containers_are_unchanged() -> None:
    inner = [Leaf(1)]
    batch = {"a": inner, "b": Leaf(2)}
    rebuilt(batch, lambda value: isinstance(value, Leaf), Leaf.pin_memory)
    assert batch == {"a": [Leaf(1)], "b": Leaf(2)}
    assert batch["a"] is inner


def test_type_error_of_the_function_is_raised() -> None:
    def fail(_: Any) -> None:
        raise TypeError("of the leaf")

    with pytest.raises(TypeError, match="of the leaf"):
        rebuilt({"a": [Leaf(1)]}, lambda value: isinstance(value, Leaf), fail)


@pytest.mark.parametrize("value", [bytearray(b"abc"), memoryview(b"abc")], ids=["bytearray", "memoryview"])
def test_buffers_are_kept_whole(value: Any) -> None:
    assert rebuilt([value], lambda _: False, lambda leaf: leaf)[0] is value


TABLE_SHAPES = st.integers(1, 2).flatmap(lambda dimensions: st.tuples(*[st.integers(0, 3)] * dimensions))
TABLE_DTYPES = st.sampled_from(["int64", "float32", "uint8", "bool", ">i4", "complex64"])
NUMBERS = st.lists(st.integers(0, 255), min_size=9, max_size=9)


def array(shape: tuple[int, ...], dtype: str, numbers: Sequence[int]) -> Any:
    return np.resize(np.array(numbers), shape).astype(dtype)


ARRAYS = st.builds(array, TABLE_SHAPES, TABLE_DTYPES, NUMBERS)
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


@given(shape=TABLE_SHAPES, dtype=TABLE_DTYPES, count=st.integers(1, 5))
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
