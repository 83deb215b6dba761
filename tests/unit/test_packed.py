"""Packed lists equal the lists that they were made of, in any memory."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset import compact as module
from headrace.dataset.compact import Packed, packed
from headrace.errors import CannotCarryError

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
strings = st.text(st.characters(exclude_categories=()))  # lone surrogates too: names of files may hold them
lists = st.lists(strings) | st.lists(st.binary()) | st.lists(anything)


@dataclasses.dataclass
class Sample:
    path: str
    label: int


class Word(str):
    """Text of a kind of its own."""

    __slots__ = ()


def carried(value: Packed[Any]) -> tuple[Packed[Any], int, list[bytes]]:
    """`value` unpickled from arrays in read-only memory at an odd address, the size of the pickle, and the arrays."""
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    memory = [bytes(buffer) for buffer in buffers]
    shifted = [memoryview(b"x" + data)[1:] for data in memory]
    return pickle.loads(blob, buffers=shifted), len(blob), memory


@given(lists)
def test_packed_equals_its_list_and_its_copy_in_read_only_memory(elements: list[Any]) -> None:
    got = packed(elements)
    assert [got[n] for n in range(len(got))] == elements
    assert got == elements
    assert elements == got
    again, _, _ = carried(got)
    assert again == got
    for one in (got, again):
        assert list(one) == elements
        assert [type(element) for element in one] == [type(element) for element in elements]


@given(lists, st.slices(12))
def test_slice_is_packed_and_equals_the_slice_of_the_list(elements: list[Any], part: slice) -> None:
    got = packed(elements)[part]
    assert isinstance(got, Packed)
    assert list(got) == list(carried(got)[0]) == elements[part]
    assert list(got[::-1]) == elements[part][::-1]


@given(lists, st.integers(1, 5))
def test_packed_does_not_depend_on_the_size_of_its_steps(elements: list[Any], chunk: int) -> None:
    with patch.object(module, "_CHUNK", chunk):
        assert list(packed(iter(elements))) == elements


def test_packed_takes_whole_numbers_in_range() -> None:
    got: Any = packed(["a", "b", "c"])
    assert got[np.int64(1)] == "b"
    for index in (3, -4, 10**30):
        with pytest.raises(IndexError, match=f"{index} .*there are 3 elements"):
            got[index]
    with pytest.raises(TypeError):
        got["b"]


def test_packed_is_read_only() -> None:
    got: Any = packed([[1]])
    with pytest.raises(TypeError):
        got[0] = [2]
    with pytest.raises(TypeError):
        hash(got)
    got[0].append(2)
    assert got == [[1]]


@pytest.mark.parametrize("other", [
    ["a", "c"], ["a"], ["a", "b", "c"], ("a", "b"), [b"a", b"b"], "ab", None, ["ab", ""],
])  # fmt: skip
def test_packed_differs_when_an_element_the_length_or_the_kind_does(other: Any) -> None:
    assert packed(["a", "b"]) != other
    if isinstance(other, list):
        assert packed(["a", "b"]) != packed(other)


def test_repr_shows_the_first_elements_and_how_many_there_are() -> None:
    assert repr(packed(["a", b"b"])) == "packed(['a', b'b'])"
    assert repr(packed(map(str, range(1000)))) == "packed(['0', '1', '2', and 997 more])"


def test_packed_is_sent_as_two_arrays_and_a_small_pickle() -> None:
    got = packed(f"train/{n:08}.jpg" for n in range(50_000))
    _, size, memory = carried(got)
    assert size < 500
    assert sorted(map(len, memory)) == [8 * 50_001, 18 * 50_000]
    assert got.nbytes == sum(map(len, memory))
    _, _, memory = carried(got[100:110])
    assert sorted(map(len, memory)) == [8 * 11, 18 * 10]


def test_copies_are_equal_in_any_form() -> None:
    got = packed([{"a": 1}, None])
    assert packed(got) is got
    assert packed(["a", "b", None])[:2] == packed(["a", "b"])
    assert copy.copy(got) == copy.deepcopy(got) == got
    for protocol in range(2, 6):
        assert pickle.loads(pickle.dumps(got, protocol)) == got


def test_instances_arrays_and_subclasses_keep_their_types() -> None:
    elements = [Sample("a.jpg", 1), Word("a"), {"box": np.arange(4)}, len, random.Random, dataclasses.replace]
    got = packed(elements)
    assert got[:2] == elements[:2]
    assert type(got[1]) is Word
    assert got[2]["box"].tolist() == [0, 1, 2, 3]
    assert list(got[3:]) == elements[3:]


def test_classes_are_stored_once_and_not_in_every_element() -> None:
    few, many = (packed([Sample("a", n % 10) for n in range(count)]) for count in (10, 1000))
    assert many.nbytes - 8 == 100 * (few.nbytes - 8)
    assert pickle.dumps(many).count(b"Sample") == 1


@pytest.mark.process
def test_elements_of_the_script_are_sent_by_value(tmp_path: Path) -> None:
    """A worker has no `__main__` of the user's: the class goes along, once, and so do functions without a name."""
    script = tmp_path / "script.py"
    script.write_text(
        "import dataclasses, sys, cloudpickle\n"
        "from headrace.dataset.compact import packed\n"
        "@dataclasses.dataclass\n"
        "class Local:\n"
        "    number: int\n"
        "elements = packed([(Local(n), lambda x: x + 1) for n in range(3)])\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(elements))\n"
    )
    blob = subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.PIPE).stdout
    got = cloudpickle.loads(blob)
    assert [(sample.number, add(sample.number)) for sample, add in got] == [(0, 1), (1, 2), (2, 3)]
    assert len({type(sample) for sample, _ in got}) == 1


@pytest.mark.parametrize("before", [["a", "b"], [b"a", b"b"], [1, 2]])
def test_packing_names_the_index_when_an_element_does_not_pickle(before: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"element 2, of type tuple, cannot be packed: .*lock") as caught:
        packed([*before, ("x", threading.Lock())])
    assert isinstance(caught.value, CannotCarryError)
    assert isinstance(caught.value.__cause__, TypeError)
