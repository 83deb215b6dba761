"""Rows of HDF5, .npy and .npz files: every layout and filter, what is refused by name, and what is read for a row."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import stored
from builders.numbers import npy, saved
from builders.stored import ranges, rows
from builders.tars import zipped

import headrace as hr
from headrace.formats.limits import Limits
from headrace.testing import FaultServer

h5py = pytest.importorskip("h5py")

COUNT = 100
RNG = np.random.default_rng(1)
IMAGES = RNG.integers(0, 255, (COUNT, 6, 5)).astype(np.uint8)  # no filter makes it shorter
FLAT = np.repeat(np.arange(COUNT, dtype=np.int32), 30).reshape(COUNT, 6, 5)
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunks": (7, 6, 5)},
    "tiles": {"chunks": (16, 4, 3)},
    "longer than the data": {"chunks": (64, 6, 5), "maxshape": (None, 6, 5)},
    "gzip": {"chunks": (7, 6, 5), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"chunks": (7, 4, 5), "compression": "lzf"},
    "scaled": {"chunks": (9, 6, 5), "scaleoffset": 0},
}


def put(write: Callable[[Any], object], **settings: Any) -> str:
    with h5py.File(out := io.BytesIO(), "w", **settings) as file:
        write(file)
    return stored.put(out.getvalue(), "0.h5")


def put_dataset(name: str, **options: Any) -> str:
    return put(lambda file: file.create_dataset(name, **options))


def two(file: Any) -> None:
    file["images"], file["labels"] = IMAGES, np.arange(COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"libver": "latest"}], ids=["oldest", "latest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_that_were_written(layout: str, settings: Mapping[str, Any]) -> None:
    def write(file: Any) -> None:
        for name, values in (("images", IMAGES), ("flat", FLAT)):
            file.create_dataset(name, data=values, **LAYOUTS[layout])

    data = hr.hdf5(put(write, **settings))
    assert len(data) == COUNT
    for k, row in enumerate(rows(data)):
        assert (row["images"] == IMAGES[k]).all()
        assert (row["flat"] == FLAT[k]).all()
        assert row["flat"].dtype == np.int32


def test_datasets_are_read_with_their_types() -> None:
    values = {
        "big": np.arange(5, dtype=">f4"),
        "half": np.arange(5, dtype=np.float16),
        "flags": np.arange(5) % 2 == 0,
        "group/deep": np.arange(10, dtype="<i8").reshape(5, 2),
    }
    data = hr.hdf5(put(lambda file: file.update(values)))
    with hr.DataLoader(data, batch_size=5) as loader:
        (batch,) = loader
    for name, value in values.items():
        assert (batch[name].numpy() == value).all()
        assert batch[name].numpy().dtype == value.dtype.newbyteorder("=")
    unwritten = hr.hdf5(put_dataset("x", shape=(9, 2), dtype="i4", chunks=(4, 2), fillvalue=7))
    assert [row["x"].tolist() for row in rows(unwritten)] == [[7, 7]] * 9


def test_datasets_are_chosen_and_named() -> None:
    def write(file: Any) -> None:
        two(file)
        file["classes"] = np.arange(3)

    place = put(write)
    data = hr.hdf5(place, {"image": "images", "y": "/labels"})
    assert set(data[3]) == {"__key__", "__url__", "image", "y"}
    assert data[-1]["y"] == COUNT - 1
    assert set(rows(hr.hdf5(place, ["labels"]))[0]) == {"labels"}
    with pytest.raises(hr.OptionError, match=r"/classes \[3\]"):
        len(hr.hdf5(place))
    with pytest.raises(hr.OptionError, match=r"'label' must be one of .*labels"):
        len(hr.hdf5(place, ["label"]))
    for wrong in ("labels", [], {"__x__": "labels"}):
        with pytest.raises(hr.OptionError, match="datasets="):
            hr.hdf5(place, wrong)


def test_datasets_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.arange(4)

    def write(file: Any) -> None:
        file["deep/er/x"] = np.arange(4)
        file["hard"] = file["deep/er/x"]
        for name, target in {
            "absolute": "/deep/er/x", "deep/relative": "er/x", "group": "./deep", "chain": "group/relative",
            "nowhere": "/none", "round": "/round", "through": "/elsewhere", "to_group": "deep", "beyond": "hard/x",
        }.items():  # fmt: skip
            file[name] = h5py.SoftLink(target)
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")

    place = put(write)
    for name in ("hard", "absolute", "/deep/relative", "group/er/x", "group/relative", "chain"):
        assert [row["x"].tolist() for row in rows(hr.hdf5(place, {"x": name}))] == [0, 1, 2, 3], name
    assert len(set(rows(hr.hdf5(place))[0])) == 1, "each dataset once"
    for name in ("nowhere", "round", "elsewhere", "through", "to_group", "beyond", "none/x"):
        with pytest.raises(hr.OptionError, match=rf"'{name.lstrip('/')}' must be one of "):
            len(hr.hdf5(place, [name]))


@pytest.mark.parametrize("taken", ["__key__", "__url__", "__xarray_dataarray_variable__"])
def test_reserved_name_of_a_dataset_is_refused(taken: str) -> None:
    place = put(lambda file: file.update({taken: np.arange(3), "x": np.arange(3), "in/__key__": np.arange(3)}))
    with pytest.raises(hr.OptionError, match=rf"{place} has '{taken}', and names .* such as {{'value': '{taken}'}}"):
        len(hr.hdf5(place))
    row = hr.hdf5(place, {"value": taken, "in": "in/__key__"})[2]
    assert (row["__key__"], row["__url__"], row["value"], row["in"]) == ("2", place, 2, 2)


def test_files_follow_one_another() -> None:
    places = [put_dataset("x", data=np.arange(k, dtype=float)) for k in (3, 0, 4)]
    data = hr.hdf5(places)
    assert [float(row["x"]) for row in rows(data)] == [0, 1, 2, 0, 1, 2, 3]
    assert sorted(float(row["x"]) for row in rows(data.shuffle("global"))) == [0, 0, 1, 1, 2, 2, 3]
    other = put_dataset("x", data=np.arange(3))
    with pytest.raises(hr.errors.FormatError, match=r"the files of a stream have the same arrays"):
        len(hr.hdf5([*places, other]))


@pytest.mark.process
def test_window_shuffle_reads_each_chunk_once() -> None:
    with h5py.File(out := io.BytesIO(), "w") as file:
        file.create_dataset("x", data=RNG.integers(0, 255, (4000, 500)).astype(np.uint8), chunks=(100, 500))
        file["y"] = np.arange(4000)
    with FaultServer() as server:
        data = hr.hdf5(server.add("a.h5", out.getvalue()))
        with hr.DataLoader(data.shuffle("window", window=400), batch_size=50) as loader:
            seen = [y for batch in loader for y in batch["y"].tolist()]
        assert sorted(seen) == list(range(4000))
        assert seen != sorted(seen)
        assert len(server.log) < 60, "40 chunks, the labels, and what describes them"


@pytest.mark.parametrize(("name", "options", "why"), [
    ("t", {"data": ["a", "bc"]}, "'/t' has values of any length"),
    ("n", {"shape": (3, 2), "dtype": "i4"}, "'/n' .*never written"),
    ("s", {"data": 3}, "no datasets with rows"),
    ("e", {"shape": (3,), "dtype": "u1", "external": [("elsewhere.bin", 0, 3)]}, "'/e' .* other files"),
])  # fmt: skip
def test_unsupported_dataset_is_refused_by_name(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=why):
        len(hr.hdf5(put_dataset(name, **options)))


def test_damage_is_an_error_that_names_the_file() -> None:
    with h5py.File(out := io.BytesIO(), "w") as file:
        file.create_dataset("x", data=FLAT, chunks=(10, 6, 5), compression="gzip", fletcher32=True)
        at = file["x"].id.get_chunk_info(3).byte_offset
    whole = out.getvalue()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * 5000, whole[:600]):
        place = stored.put(damaged, "0.h5")
        with pytest.raises(hr.errors.FormatError, match=place):
            len(hr.hdf5(place))
    place = stored.put(whole[:at] + b"\xff" * 9 + whole[at + 9 :], "0.h5")
    data = hr.hdf5(place)
    assert (data[29]["x"] == 29).all()
    with pytest.raises(hr.errors.FormatError, match=rf"{place}: the chunk of '/x' at byte {at} does not decode"):
        data[30]


@pytest.mark.slow
def test_data_over_a_limit_is_a_limit_error() -> None:
    place = put(two)
    with pytest.raises(hr.errors.LimitError, match="'/images'"):
        len(hr.hdf5(place, limits=Limits(member_bytes=29)))
    many = put(lambda file: [file.create_dataset(f"{n}/x", data=np.arange(3)) for n in range(2000)])
    with pytest.raises(hr.errors.LimitError, match="what describes its datasets"):
        len(hr.hdf5(many, limits=Limits(member_bytes=1000)))


@pytest.mark.parametrize("layout", ["plain", "chunks", "gzip"])
def test_file_with_a_user_block_is_read_or_refused_by_name(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: Any) -> None:
        file.create_dataset("x", data=IMAGES, **LAYOUTS[layout])

    place = put(write, userblock_size=1024)
    if layout == "plain" or h5py.version.hdf5_version_tuple >= (1, 14, 4):
        assert all((row["x"] == IMAGES[k]).all() for k, row in enumerate(hr.hdf5(place)))
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", (1, 14, 3))
    if layout == "plain":
        assert len(hr.hdf5(place)) == COUNT
    else:
        with pytest.raises(hr.errors.FormatError, match=rf"{place}: the dataset '/x' .* user block.* h5py 3"):
            len(hr.hdf5(place))
    assert len(hr.hdf5(put(write))) == COUNT


ROWS = 60
VALUES: dict[str, Any] = {
    "images": np.random.default_rng(1).integers(0, 255, (ROWS, 40, 50)).astype(np.uint8),
    "labels": np.arange(ROWS, dtype=">i4"),
    "by_column": np.asfortranarray(np.arange(ROWS * 6.0).reshape(ROWS, 2, 3)),
    "flags": np.arange(ROWS) % 3 == 0,
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_of_an_archive_equal_its_arrays(save: Any) -> None:
    data = hr.arrays(stored.put(saved(save, **VALUES), "0.npz"))
    assert len(data) == ROWS
    for k, row in enumerate(data):
        for name, values in VALUES.items():
            assert (row[name] == values[k]).all()
            assert row[name].dtype == values.dtype.newbyteorder("=")
    seen = [int(row["labels"]) for row in data.shuffle("global", seed=1)]
    assert sorted(seen) == list(range(ROWS))
    assert seen != sorted(seen)


def test_rows_of_a_single_array_are_called_value() -> None:
    places = [stored.put(npy(VALUES["images"][a:b]), "0.npy") for a, b in ((0, 25), (25, 25), (25, 60))]
    data = hr.arrays(places)
    assert len(data) == ROWS
    assert all((row["value"] == VALUES["images"][k]).all() for k, row in enumerate(data))
    assert set(hr.arrays(places, {"image": "value"})[-1]) == {"__key__", "__url__", "image"}


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_state_does_not_fit_other_arrays(is_shuffled: bool) -> None:
    place = stored.put(saved(np.savez, **{name: np.arange(8) for name in ("a/x", "b/x", "a?x", "a?y")}), "0.npz")

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
def test_truncated_arrays_are_an_error_that_names_the_file(save: Any) -> None:
    whole = saved(save, x=VALUES["images"], y=VALUES["labels"])
    for k in range(12):
        place = stored.put(whole[: len(whole) * k // 12], "0.npz")
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
    place = stored.put(data, f"0.{ending}")
    with pytest.raises(hr.errors.FormatError, match=rf"{place}.*{why}"):
        list(hr.arrays(place))


def test_arrays_over_a_limit_are_a_limit_error() -> None:
    place = stored.put(saved(np.savez_compressed, x=np.zeros((1000, 1000))), "0.npz")
    with pytest.raises(hr.errors.LimitError, match="a part of 'x' has 8000000 bytes, over the limit of 1000000"):
        len(hr.arrays(place, limits=Limits(member_bytes=10**6)))
    with pytest.raises(hr.errors.LimitError, match="over the limit"):
        list(hr.arrays(place, limits=Limits(unpacked_free_bytes=1, unpacked_ratio=3)))
