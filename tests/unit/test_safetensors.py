"""Safetensors: tensors are what was written, as files and as rows; a wrong header is an error."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from builders.stored import put, rows
from builders.tensor_files import DTYPES, file_of, whole

import headrace as hr
from headrace.errors import FormatError, LimitError, StageError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.safetensors import SafeTensors
from headrace.testing.decoders import same


def stream(data: bytes, is_by_row: bool = False, limits: Limits = DEFAULTS) -> hr.Stream:
    return hr.stream(put(data, "some.safetensors"), format=SafeTensors(rows=is_by_row), limits=limits)


ALL = {str(dtype): (torch.arange(12).reshape(4, 3) % 2).to(dtype) for dtype in DTYPES}


def test_file_is_a_sample_with_its_tensors() -> None:
    more = {"point": torch.tensor(1.5), "none": torch.zeros(0, 3)}
    data = stream(file_of({**ALL, **more}))
    assert same(rows(data), [{**ALL, **more}])
    assert data.keys() == ["some"]


def test_files_of_the_library_are_read() -> None:
    library = pytest.importorskip("safetensors.torch")
    (sample,) = stream(library.save(ALL))
    assert same({name: sample[name] for name in ALL}, ALL)


def test_rows_option_makes_each_row_a_sample() -> None:
    data = stream(file_of(ALL), True)
    assert same(rows(data), [{name: tensor[k] for name, tensor in ALL.items()} for k in range(4)])
    assert len(data) == 4
    assert same(data[2]["torch.int64"], ALL["torch.int64"][2])
    assert list(stream(file_of({"a": torch.zeros(0, 5)}), True)) == []


@pytest.mark.parametrize("tensors", [{"a": torch.zeros(3), "b": torch.zeros(2)}, {"a": torch.tensor(1)}])
def test_rows_of_tensors_that_share_no_dimension_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(FormatError, match="do not share their first dimension"):
        list(stream(file_of(tensors), True))


def entry(shape: Any = (2,), places: Any = (0, 2), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": places}


@pytest.mark.slow
@pytest.mark.parametrize("data", [
    b"", b"\1\2\3", whole(b"[]"), whole(b"{"), whole(b"[" * 1000), whole({"a": 1}, b"ab"), whole({"a": entry()}, b"a"),
    whole({"a": entry()}, b"abc"), whole({"a": entry((3,))}, b"ab"), whole({"a": entry(places=(2, 0))}, b"ab"),
    whole({"a": entry(places=(0, 2)), "b": entry(places=(1, 3))}, b"abc"), whole({"a": entry((-1, -2))}, b"ab"),
    whole({"a": entry(places=(1, 3))}, b"abc"), whole({"a": entry(dtype="F4")}, b"ab"),
    whole({"a": entry(dtype=5)}, b"ab"),
    whole({"a": entry((2**60, 0), (0, 0))}), whole({"a": entry([1.5], (0, 2))}, b"ab"),
    whole({"a": entry(places=(0,))}, b"ab"),
    whole(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    struct.pack("<Q", 2**63) + b"{}", file_of(ALL)[:-1], file_of(ALL)[:40], whole({"__a": entry()}, b"ab"),
])  # fmt: skip
def test_file_that_is_damaged_is_an_error(data: bytes) -> None:
    for is_by_row in (False, True):
        with pytest.raises(StageError, match=r"memory://stored/\d+/some.safetensors"):
            list(stream(data, is_by_row))


@pytest.mark.parametrize("limits", [Limits(member_bytes=100), Limits(header_bytes=50), Limits(fields=3)])
def test_file_over_a_limit_is_a_limit_error(limits: Limits) -> None:
    for is_by_row in (False, True):
        with pytest.raises(LimitError):
            list(stream(file_of(ALL), is_by_row, limits))


def test_rows_without_bytes_are_not_counted() -> None:
    with pytest.raises(FormatError, match="rows have no bytes"):
        list(stream(whole({"a": entry((2**50, 0), (0, 0))}), True))
    with pytest.raises(LimitError, match="500 rows"):
        list(stream(file_of({"a": torch.zeros(500, dtype=torch.uint8)}), True, Limits(member_bytes=2000)))
