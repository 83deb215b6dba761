"""Data sets of other libraries, given to `hr.from_map` and `hr.from_iterable`: `nox -s foreign` installs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr

COUNT = 50

pytestmark = pytest.mark.may_leave(
    threads=".*", descriptors=".*", mappings=".*", files=".*", reason="the libraries keep pools, locks and caches"
)


def numbers(data: hr.Stream, **options: Any) -> list[list[int]]:
    with hr.DataLoader(data, batch_size=5, **options) as loader:
        return [batch["n"].tolist() for batch in loader]


def check_map(dataset: Any) -> None:
    data = hr.from_map(dataset).shuffle(seed=1)
    whole = numbers(data)
    assert sorted(n for batch in whole for n in batch) == list(range(COUNT))
    with hr.DataLoader(data, batch_size=5) as loader:
        first = [next(iter(loader))["n"].tolist()]
        state = loader.state_dict()
    with hr.DataLoader(data, batch_size=5) as loader:
        loader.load_state_dict(state)
        assert first + [batch["n"].tolist() for batch in loader] == whole


def test_hugging_faces_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    check_map(datasets.Dataset.from_dict({"n": list(range(COUNT))}))


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_hugging_faces_iterable_dataset_goes_on(taken: int) -> None:
    datasets = pytest.importorskip("datasets")

    def data() -> hr.Stream:
        rows = datasets.Dataset.from_dict({"n": list(range(COUNT))}).to_iterable_dataset(num_shards=4)
        return hr.from_iterable(rows.map(lambda row: {"n": row["n"]}).filter(lambda row: row["n"] != 7))

    whole = numbers(data())
    assert [n for batch in whole for n in batch] == [n for n in range(COUNT) if n != 7]
    with hr.DataLoader(data(), batch_size=5) as loader:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
    with hr.DataLoader(data(), batch_size=5) as loader:
        loader.load_state_dict(state)
        assert [batch["n"].tolist() for batch in loader] == whole[taken:]
        assert [batch["n"].tolist() for batch in loader] == whole, "the next epoch has all of them"


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
    assert sorted(n for batch in numbers(data) for n in batch) == list(range(COUNT))
