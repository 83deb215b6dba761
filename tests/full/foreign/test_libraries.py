"""Data sets of other libraries, given to `hr.from_map` and `hr.from_iterable`: `nox -s foreign` installs them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from builders.loops import flat, loaded, rest_of, state_after

import headrace as hr

COUNT = 50

pytestmark = pytest.mark.may_leave(
    threads=".*", descriptors=".*", mappings=".*", files=".*", reason="the libraries keep pools, locks and caches"
)


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


def check_map(dataset: Any) -> None:
    data = hr.from_map(dataset).shuffle(seed=1)
    whole = numbers(loaded(data, batch_size=5))
    assert sorted(flat(whole)) == list(range(COUNT))
    state = state_after(hr.DataLoader(data, batch_size=5), 1)
    assert numbers(rest_of(hr.DataLoader(data, batch_size=5), state)) == whole[1:]


def test_hugging_faces_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    check_map(datasets.Dataset.from_dict({"n": list(range(COUNT))}))


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_hugging_faces_iterable_dataset_resumes(taken: int) -> None:
    datasets = pytest.importorskip("datasets")

    def data() -> hr.Stream:
        rows = datasets.Dataset.from_dict({"n": list(range(COUNT))}).to_iterable_dataset(num_shards=4)
        return hr.from_iterable(rows.map(lambda row: {"n": row["n"]}).filter(lambda row: row["n"] != 7))

    whole = numbers(loaded(data(), batch_size=5))
    assert flat(whole) == [n for n in range(COUNT) if n != 7]
    state = state_after(hr.DataLoader(data(), batch_size=5), taken)
    with hr.DataLoader(data(), batch_size=5) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == whole[taken:]
        assert numbers(loader) == whole, "the next epoch has all of them"


def test_lance(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    pyarrow = pytest.importorskip("pyarrow")
    lance.write_dataset(pyarrow.table({"n": list(range(COUNT))}), str(tmp_path / "a.lance"))

    class Rows:
        def __init__(self) -> None:
            self.table = lance.dataset(str(tmp_path / "a.lance"))

        def __len__(self) -> int:
            return int(self.table.count_rows())

        def __getitem__(self, index: int) -> Any:
            return self.table.take([index]).to_pylist()[0]

    check_map(Rows())


def test_array_record(tmp_path: Path) -> None:
    writers = pytest.importorskip("array_record.python.array_record_module")
    sources = pytest.importorskip("array_record.python.array_record_data_source")
    writer = writers.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for n in range(COUNT):
        writer.write(str(n).encode())
    writer.close()
    source = sources.ArrayRecordDataSource([str(tmp_path / "a.array_record")])
    data = hr.from_map(source).shuffle().map(lambda record: {"n": int(record)})
    assert sorted(flat(numbers(loaded(data, batch_size=5)))) == list(range(COUNT))
