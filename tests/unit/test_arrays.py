"""Rows of .npy and .npz files: what is read for them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders.arrays import npy, saved
from builders.stored import put, ranges
from builders.zips import zipped

import headrace as hr
from headrace.formats.limits import Limits
from headrace.testing import FaultServer

COUNT = 60
VALUES: dict[str, Any] = {
    "images": np.random.default_rng(1).integers(0, 255, (COUNT, 40, 50)).astype(np.uint8),
    "labels": np.arange(COUNT, dtype=">i4"),
    "by_column": np.asfortranarray(np.arange(COUNT * 6.0).reshape(COUNT, 2, 3)),
    "flags": np.arange(COUNT) % 3 == 0,
}


def put_npz(**values: Any) -> str:
    return put(saved(np.savez, **values), "0.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_of_an_archive_equal_its_arrays(save: Any) -> None:
    data = hr.arrays(put(saved(save, **VALUES), "0.npz"))
    assert len(data) == COUNT
    for k, row in enumerate(data):
        for name, values in VALUES.items():
            assert (row[name] == values[k]).all()
            assert row[name].dtype == values.dtype.newbyteorder("=")
    seen = [int(row["labels"]) for row in data.shuffle("global", seed=1)]
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)


def test_rows_of_a_single_array_are_called_value() -> None:
    places = [put(npy(VALUES["images"][a:b]), "0.npy") for a, b in ((0, 25), (25, 25), (25, 60))]
    data = hr.arrays(places)
    assert len(data) == COUNT
    assert all((row["value"] == VALUES["images"][k]).all() for k, row in enumerate(data))
    assert set(hr.arrays(places, {"image": "value"})[-1]) == {"__key__", "__url__", "image"}


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_state_does_not_fit_other_arrays(is_shuffled: bool) -> None:
    place = put_npz(**{name: np.arange(8) for name in ("a/x", "b/x", "a?x", "a?y")})

    def loader(names: Any) -> Any:
        data = hr.arrays(place, names)
        return hr.DataLoader(data.shuffle(seed=1) if is_shuffled else data, batch_size=2)

    with loader(["a/x"]) as first:
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        rest = [batch["a/x"].tolist() for batch in batches]
    for others in (["b/x"], ["a?x"], {"y": "a/x"}, ["a/x", "b/x"], None):
        with loader(others) as other, pytest.raises(hr.StateMismatchError):
            other.load_state_dict(state)
            next(iter(other))
    with loader({"a/x": "a/x"}) as same:
        same.load_state_dict(state)
        assert [batch["a/x"].tolist() for batch in same] == rest


@pytest.mark.process
def test_one_row_of_a_stored_array_is_read_by_its_range() -> None:
    values = np.zeros((500, 100_000), np.uint8)
    with FaultServer() as server:
        data = hr.arrays(server.add("a.npz", saved(np.savez, x=values, y=np.arange(500))))
        assert data[400]["y"] == 400
        assert sum(stop - start for start, stop in ranges(server)) < 500_000


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_is_an_error_that_names_the_file(save: Any) -> None:
    whole = saved(save, x=VALUES["images"], y=VALUES["labels"])
    for k in range(12):
        place = put(whole[: len(whole) * k // 12], "0.npz")
        with pytest.raises(hr.errors.FormatError, match=place):
            list(hr.arrays(place))


COMPRESSED = saved(np.savez_compressed, x=VALUES["images"])


@pytest.mark.parametrize(("ending", "data", "why"), [
    ("npy", npy(VALUES["images"])[:-1], " is damaged: its header"),
    ("npy", npy(VALUES["by_column"]), " is damaged: .*by columns"),
    ("npy", npy(np.array(3)), " is damaged: .*single number"),
    ("npy", npy(np.array([{}], object)), " is damaged: .*Python objects"),
    ("npy", b"x" * 300, " is damaged: .*does not begin as an .npy file"),
    ("npy", b"", " is damaged: .*does not begin as an .npy file"),
    ("npz", zipped({"a.txt": b"text"}), "has no arrays"),
    ("npz", zipped({"a.npy": npy(np.arange(5)) + b"more"}), "the array 'a' cannot be read: its header"),
    ("npz", COMPRESSED[:9000] + b"\xff\0\xff" + COMPRESSED[9003:], ": the array 'x' is damaged"),
])  # fmt: skip
def test_unreadable_array_is_an_error_with_the_reason(ending: str, data: bytes, why: str) -> None:
    place = put(data, f"0.{ending}")
    with pytest.raises(hr.errors.FormatError, match=rf"{place}.*{why}"):
        list(hr.arrays(place))


def test_data_over_a_limit_is_a_limit_error() -> None:
    place = put(saved(np.savez_compressed, x=np.zeros((1000, 1000))), "0.npz")
    with pytest.raises(hr.errors.LimitError, match="a part of 'x' has 8000000 bytes, over the limit of 1000000"):
        len(hr.arrays(place, limits=Limits(member_bytes=10**6)))
    with pytest.raises(hr.errors.LimitError, match="over the limit"):
        list(hr.arrays(place, limits=Limits(unpacked_free_bytes=1, unpacked_ratio=3)))
