"""What samples become in a batch: torch's default_collate and default_convert, collate functions, pinned memory."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drop_in.reading import next_error
from torch import tensor
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

both = pytest.mark.parametrize("num_workers", [0, 2])
F64 = torch.float64


class Made(Dataset[Any]):
    """The samples of a list that each process makes for itself."""

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        self.make, self.count = make, len(make())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Any:
        return self.make()[k]


class Point(NamedTuple):
    x: Any
    y: Any


class Labelled(UserDict[str, Any]):
    label = "none"


class Named(UserList[Any]):
    name = "none"


class Frozen(Mapping[str, Any]):
    """A mapping that is made of another one and never changed."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class OneKey(Frozen):
    """Is not made of a mapping."""

    def __init__(self, value: Any = None, *, key: str) -> None:
        super().__init__({key: value})


class Row(Sequence[Any]):
    """A sequence that is made of another one and never changed."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def __getitem__(self, k: Any) -> Any:
        return self._values[k]

    def __len__(self) -> int:
        return len(self._values)


class Image(torch.Tensor):
    pass


class Colour(enum.IntEnum):
    RED = 3
    BLUE = 5


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any = None


def with_attribute(value: Any, **attributes: Any) -> Any:
    value.__dict__.update(attributes)
    return value


def assert_same(got: Any, expected: Any) -> None:
    """Equal in the types of all parts, in dtypes, shapes and values."""
    assert type(got) is type(expected), f"{got!r} is no {expected!r}"
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
        assert torch.equal(got, expected)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(got, expected)
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes | range):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, BaseException):
        assert got.args == expected.args
    elif not hasattr(expected, "__dict__"):
        assert got == expected
    if hasattr(expected, "__dict__") and not isinstance(expected, torch.Tensor | BaseException | enum.Enum):
        assert_same(vars(got), vars(expected))


def differences(got: Sequence[Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """What is not the same, by the name of its case."""
    assert len(got) == len(expected)
    found = {}
    for one, (name, other) in zip(got, expected.items(), strict=True):
        try:
            assert_same(one, other)
        except AssertionError as error:
            found[name] = str(error)
    return found


def batches_and_errors(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield error.with_traceback(None)


COLLATED: dict[str, tuple[Callable[[], Sequence[Any]], Any]] = {
    "tensors": (lambda: [tensor([1.5, 2]), tensor([3, -0.5])], tensor([[1.5, 2], [3, -0.5]])),
    "tensors of no dimension": (lambda: [tensor(1), tensor(2)], tensor([1, 2])),
    "tensors of no elements": (lambda: [torch.empty(0, 3)] * 2, torch.empty(2, 0, 3)),
    "tensors with strides": (lambda: [torch.arange(6).view(2, 3).T] * 2, tensor([[[0, 3], [1, 4], [2, 5]]] * 2)),
    "half precision": (lambda: [tensor([1.5], dtype=torch.bfloat16)] * 2, tensor([[1.5]] * 2, dtype=torch.bfloat16)),
    "complex tensors": (lambda: [tensor([1 + 2j])] * 2, tensor([[1 + 2j]] * 2)),
    "bool tensors": (lambda: [tensor([True, False])] * 2, tensor([[True, False]] * 2)),
    "tensors of a subclass": (lambda: [Image([1.0]), Image([2.0])], Image([[1.0], [2.0]])),
    "large tensors": (
        lambda: [torch.full((100, 100), k) for k in (1.0, 2.0)],
        torch.stack([torch.full((100, 100), k) for k in (1.0, 2.0)]),
    ),
    "arrays": (lambda: [np.array([1, 2], "i2")] * 2, tensor([[1, 2]] * 2, dtype=torch.int16)),
    "arrays of no dimension": (lambda: [np.array(1.5), np.array(2.5)], tensor([1.5, 2.5], dtype=F64)),
    "arrays with strides": (lambda: [np.arange(6).reshape(2, 3).T] * 2, tensor([[[0, 3], [1, 4], [2, 5]]] * 2)),
    "numpy scalars": (lambda: [np.float32(1.5), np.float32(2.5)], tensor([1.5, 2.5])),
    "numpy scalars that are Python's too": (lambda: [np.float64(1.5), np.float64(2)], tensor([1.5, 2], dtype=F64)),
    "numpy truth values": (lambda: [np.bool_(True), np.bool_(False)], tensor([True, False])),
    "unsigned scalars": (lambda: [np.uint16(1), np.uint16(2)], tensor([1, 2], dtype=torch.uint16)),
    "numpy scalars of two types": (lambda: [np.int32(1), np.float64(2.5)], tensor([1, 2.5], dtype=F64)),
    "ints": (lambda: [1, -2], tensor([1, -2])),
    "floats": (lambda: [1.5, 2.5], tensor([1.5, 2.5], dtype=F64)),
    "truth values": (lambda: [True, False], tensor([True, False])),
    "an int, then a float": (lambda: [1, 2.5], tensor([1, 2.5])),
    "a float, then an int": (lambda: [1.5, 2], tensor([1.5, 2], dtype=F64)),
    "a truth value, then an int": (lambda: [True, 2], tensor([1, 2])),
    "enumerated ints": (lambda: [Colour.RED, Colour.BLUE], tensor([3, 5])),
    "text": (lambda: ["a", "bc"], ["a", "bc"]),
    "text, then what is none": (lambda: ["a", 1], ["a", 1]),
    "bytes": (lambda: [b"a", b"bc"], [b"a", b"bc"]),
    "numpy text": (lambda: [np.str_("a"), np.str_("b")], [np.str_("a"), np.str_("b")]),
    "dicts": (lambda: [{"a": 1, "b": "x"}, {"b": "y", "a": 2}], {"a": tensor([1, 2]), "b": ["x", "y"]}),
    "dicts with keys of any type": (
        lambda: [{1: 2, (3,): 4, None: 5}] * 2,
        {1: tensor([2, 2]), (3,): tensor([4, 4]), None: tensor([5, 5])},
    ),
    "dicts, the second with more": (lambda: [{"a": 1}, {"a": 2, "b": 3}], {"a": tensor([1, 2])}),
    "ordered dicts": (lambda: [OrderedDict(b=1, a=2)] * 2, OrderedDict(b=tensor([1, 1]), a=tensor([2, 2]))),
    "default dicts": (lambda: [defaultdict(int, a=1)] * 2, defaultdict(int, a=tensor([1, 1]))),
    "mappings with attributes": (
        lambda: [with_attribute(Labelled(a=1), label="first"), with_attribute(Labelled(a=2), label="second")],
        with_attribute(Labelled(a=tensor([1, 2])), label="first"),
    ),
    "mappings that do not change": (lambda: [Frozen({"a": 1})] * 2, Frozen({"a": tensor([1, 1])})),
    "mappings that are made otherwise": (lambda: [OneKey(1, key="a")] * 2, {"a": tensor([1, 1])}),
    "named tuples": (lambda: [Point(1, "a"), Point(2, "b")], Point(tensor([1, 2]), ("a", "b"))),
    "tuples": (lambda: [(1, "a"), (2, "b")], [tensor([1, 2]), ("a", "b")]),
    "lists": (lambda: [[1, "a"], [2, "b"]], [tensor([1, 2]), ("a", "b")]),
    "lists of no length": (lambda: [[], []], []),
    "sequences with attributes": (
        lambda: [with_attribute(Named([1]), name="first"), Named([2])],
        with_attribute(Named([tensor([1, 2])]), name="first"),
    ),
    "sequences that do not change": (lambda: [Row([1]), Row([2])], Row([tensor([1, 2])])),
    "double-ended queues": (lambda: [deque([1]), deque([2])], deque([tensor([1, 2])])),
    "ranges": (lambda: [range(2), range(2)], [tensor([0, 0]), tensor([1, 1])]),
    "parts within parts": (
        lambda: [{"p": Point((1, [2.5]), {"q": "a"}), "z": np.int8(3)}] * 2,
        {
            "p": Point([tensor([1, 1]), [tensor([2.5, 2.5], dtype=F64)]], {"q": ["a", "a"]}),
            "z": tensor([3, 3], dtype=torch.int8),
        },
    ),
}


@pytest.mark.slow
@both
def test_batches_are_what_default_collate_makes(loader_class: Any, num_workers: int) -> None:
    data = Made(lambda: [sample for make, _ in COLLATED.values() for sample in make()])
    batches = list(loader_class(data, 2, num_workers=num_workers))
    assert differences(batches, {name: expected for name, (_, expected) in COLLATED.items()}) == {}


LARGE: dict[str, Callable[[int], Any]] = {
    "tensors": lambda k: torch.full((50, 70), float(k)),
    "arrays with strides": lambda k: np.full((50, 70), k).T,
    "tuples": lambda k: (torch.full((50, 70), float(k)), k, f"the {k}th"),
    "named tuples": lambda k: Point(np.full(5000, k), k / 2),
    "dicts": lambda k: {"a": torch.full((50, 70), k), "b": {"c": np.full((5000,), k, "u1")}, "d": k % 2 == 0},
    "lists": lambda k: [torch.full((5000,), k), np.float32(k), [b"x" * k]],
    "other mappings": lambda k: Labelled(a=torch.full((5000,), k)),
    "other tensors": lambda k: Image(torch.full((5000,), float(k))),
    "a form that changes": lambda k: torch.full((5000,), k) if k < 5 else np.full((6000,), k),
}


@pytest.mark.slow
@both
@pytest.mark.parametrize("name", LARGE)
def test_large_batches_are_what_default_collate_makes_of_their_samples(
    loader_class: Any, num_workers: int, name: str
) -> None:
    sample = LARGE[name]
    batches = list(loader_class(Made(lambda: [sample(k) for k in range(12)]), 5, num_workers=num_workers))
    expected = [default_collate([sample(k) for k in keys]) for keys in (range(5), range(5, 10), range(10, 12))]
    assert_same(batches, expected)


@pytest.mark.slow
@both
def test_rows_of_a_mapped_file_become_tensors(loader_class: Any, num_workers: int, tmp_path: Path) -> None:
    written = np.memmap(tmp_path / "rows", "f4", "w+", shape=(4, 3))
    written[:] = np.arange(12).reshape(4, 3)
    for data in (written, Made(lambda: np.memmap(tmp_path / "rows", "f4", "r+", shape=(4, 3)))):
        batches = list(loader_class(data, 2, num_workers=num_workers))
        assert_same(batches, [torch.arange(6.0).view(2, 3), torch.arange(6.0, 12).view(2, 3)])


NOT_COLLATED = "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found {}"
NOT_OF_THIS_KIND = (
    "Batches of {} tensors are not currently supported by the default collate_fn; "
    "please provide a custom collate_fn to handle them appropriately."
)
REFUSED: dict[str, tuple[Callable[[], Sequence[Any]], type[Exception], str]] = {
    "nothing": (lambda: [None, None], TypeError, NOT_COLLATED.format(type(None))),
    "sets": (lambda: [{1}, {2}], TypeError, NOT_COLLATED.format(set)),
    "complex numbers": (lambda: [1j, 2j], TypeError, NOT_COLLATED.format(complex)),
    "dates": (lambda: [np.datetime64("2020-01-01")] * 2, TypeError, NOT_COLLATED.format(np.datetime64)),
    "dataclasses": (lambda: [Pair(1), Pair(2)], TypeError, NOT_COLLATED.format("<class '")),
    "within a dict": (lambda: [{"a": (1, None)}] * 2, TypeError, NOT_COLLATED.format(type(None))),
    "arrays of text": (lambda: [np.array(["ab"])] * 2, TypeError, NOT_COLLATED.format("<U2")),
    "arrays of objects": (lambda: [np.array([None])] * 2, TypeError, NOT_COLLATED.format("object")),
    "nested tensors": (
        lambda: [torch.nested.nested_tensor([tensor([1])], layout=torch.jagged)] * 2,
        RuntimeError,
        NOT_OF_THIS_KIND.format("nested"),
    ),
    "sparse tensors": (lambda: [torch.eye(2).to_sparse()] * 2, RuntimeError, NOT_OF_THIS_KIND.format("sparse")),
    "unequal shapes": (
        lambda: [torch.ones(2), torch.ones(3)],
        RuntimeError,
        "stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1",
    ),
    "unequal shapes of arrays": (
        lambda: [np.ones((1, 2)), np.ones((2, 1))],
        RuntimeError,
        "stack expects each tensor to be equal size, but got [1, 2] at entry 0 and [2, 1] at entry 1",
    ),
    "unequal lengths": (
        lambda: [(1, 2), (1,)],
        RuntimeError,
        "each element in list of batch should be of equal size",
    ),
    "a missing key": (lambda: [{"a": 1, "b": 2}, {"a": 1}], KeyError, "b"),
    "an int, then text": (lambda: [1, "a"], TypeError, "invalid data type 'str'"),
    "an int, then nothing": (lambda: [1, None], RuntimeError, "Could not infer dtype of NoneType"),
    "an int of too many bits": (lambda: [2**63, 1], ValueError, "Overflow when unpacking long long"),
    "an array of another byte order": (lambda: [np.ones(1, ">f4")] * 2, ValueError, "byte order"),
}


@pytest.mark.slow
@both
def test_default_collate_refuses_what_it_has_no_rule_for(loader_class: Any, num_workers: int) -> None:
    data = Made(lambda: [sample for make, *_ in REFUSED.values() for sample in make()])
    got = list(batches_and_errors(iter(loader_class(data, 2, num_workers=num_workers))))
    assert len(got) == len(REFUSED)
    for error, (name, (_, kind, text)) in zip(got, REFUSED.items(), strict=True):
        assert isinstance(error, kind), f"{name}: {error!r}"
        assert text in str(error), name


def test_tensors_of_unequal_dtypes_are_promoted_in_the_process(loader_class: Any) -> None:
    for make in (lambda: [tensor([1.0]), tensor([2.0], dtype=F64)], lambda: [tensor([1]), tensor([2.0], dtype=F64)]):
        assert_same(next(iter(loader_class(Made(make), 2))), tensor([[1.0], [2.0]], dtype=F64))


@pytest.mark.slow
def test_tensors_of_unequal_dtypes_become_the_firsts_where_that_can_hold_them_in_a_worker(loader_class: Any) -> None:
    floats = iter(loader_class(Made(lambda: [tensor([1.0]), tensor([2.0], dtype=F64)]), 2, num_workers=1))
    assert_same(next(floats), tensor([[1.0], [2.0]]))
    mixed = iter(loader_class(Made(lambda: [tensor([1]), tensor([2.0])]), 2, num_workers=1))
    error = next_error(mixed)
    assert isinstance(error, TypeError)
    assert "input types can't be cast to the desired output type Long" in str(error)


# What users add to torch's registry


@pytest.fixture
def registry() -> Iterator[dict[Any, Any]]:
    """torch's own, as it was before after the test."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


@pytest.mark.slow
@both
def test_registered_functions_are_used_when_the_registry_was_extended(
    loader_class: Any, num_workers: int, registry: dict[Any, Any]
) -> None:
    registry[Pair] = lambda batch, *, collate_fn_map: Pair(tensor([sample.left for sample in batch]), len(batch))
    batches = list(loader_class(Made(lambda: [Pair(1), Pair(2), Pair(3)]), 2, num_workers=num_workers))
    assert_same(batches, [Pair(tensor([1, 2]), 2), Pair(tensor([3]), 1)])
    nested = loader_class(Made(lambda: [{"a": (Pair(1), 5)}]), num_workers=num_workers)
    assert_same(list(nested), [{"a": [Pair(tensor([1]), 1), tensor([5])]}])


@pytest.mark.slow
@both
def test_registered_functions_are_used_when_they_replace_torchs(
    loader_class: Any, num_workers: int, registry: dict[Any, Any]
) -> None:
    registry[torch.Tensor] = lambda batch, *, collate_fn_map: torch.cat([part.flatten() for part in batch])
    data = Made(lambda: [torch.ones(1), torch.zeros(1, 2)])
    assert_same(list(loader_class(data, 2, num_workers=num_workers)), [tensor([1.0, 0.0, 0.0])])


# Without batches


CONVERTED: dict[str, tuple[Callable[[], Any], Any]] = {
    "a tensor": (lambda: tensor([1, 2]), tensor([1, 2])),
    "an array": (lambda: np.array([1.5, 2.5], "f4"), tensor([1.5, 2.5])),
    "a numpy scalar": (lambda: np.int16(3), tensor(3, dtype=torch.int16)),
    "an array of text": (lambda: np.array(["ab", "c"]), np.array(["ab", "c"])),
    "an array of objects": (lambda: np.array([None, 1]), np.array([None, 1])),
    "numpy text": (lambda: np.str_("a"), np.str_("a")),
    "an int": (lambda: 1, 1),
    "a float": (lambda: 1.5, 1.5),
    "text": (lambda: "ab", "ab"),
    "bytes": (lambda: b"ab", b"ab"),
    "nothing": (lambda: None, None),
    "a set": (lambda: {1, 2}, {1, 2}),
    "a complex number": (lambda: 1j, 1j),
    "a dataclass": (lambda: Pair(1, "a"), Pair(1, "a")),
    "a dict": (lambda: {"a": np.float32(1), "b": "x"}, {"a": tensor(1.0), "b": "x"}),
    "a mapping with attributes": (
        lambda: with_attribute(Labelled(a=np.float32(1)), label="mine"),
        with_attribute(Labelled(a=tensor(1.0)), label="mine"),
    ),
    "a mapping that does not change": (lambda: Frozen({"a": np.float32(1)}), Frozen({"a": tensor(1.0)})),
    "a named tuple": (lambda: Point(np.float32(1), "a"), Point(tensor(1.0), "a")),
    "a tuple": (lambda: (np.float32(1), "a"), [tensor(1.0), "a"]),
    "a list": (lambda: [np.float32(1), (2,)], [tensor(1.0), [2]]),
    "a sequence that does not change": (lambda: Row([np.float32(1)]), Row([tensor(1.0)])),
    "a range": (lambda: range(2), [0, 1]),
    "an exception": (lambda: ValueError("x"), ValueError("x")),
}


@pytest.mark.slow
@both
def test_samples_are_what_default_convert_makes_of_them(loader_class: Any, num_workers: int) -> None:
    samples = list(
        loader_class(Made(lambda: [make() for make, _ in CONVERTED.values()]), None, num_workers=num_workers)
    )
    assert differences(samples, {name: expected for name, (_, expected) in CONVERTED.items()}) == {}
