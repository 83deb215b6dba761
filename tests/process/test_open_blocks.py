"""Blocks of many samples at worker processes: each is opened by one of them, whatever becomes of that one."""

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from builders.parquet import of_table

import headrace as hr
from headrace.formats.format import Block
from headrace.workers.queue import Opening

ROWS, GROUP, BATCH = 480, 60, 16


class Counted(hr.Parquet):
    """Logs the groups of rows that are opened, and kills its worker at one of them, once or always."""

    def __init__(self, folder: Path, dies_at: int = -1, is_deadly: bool = False) -> None:
        super().__init__()
        self.folder, self.dies_at, self.is_deadly = str(folder), dies_at, is_deadly

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        rows = super().open_block(block, bodies)
        first: Any = rows[0]
        with Path(f"{self.folder}/opened").open("a") as file:
            file.write(f"{first['n'] // GROUP} {os.getpid()}\n")
        if first["n"] // GROUP == self.dies_at and (self.is_deadly or not Path(f"{self.folder}/died").exists()):
            Path(f"{self.folder}/died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{k}.parquet" for k in range(2)]
    for k, path in enumerate(paths):
        numbers = list(range(k * ROWS // 2, (k + 1) * ROWS // 2))
        path.write_bytes(
            of_table(pa.table({"n": numbers, "text": [f"row {n}" for n in numbers]}), row_group_size=GROUP)
        )
    return [str(path) for path in paths]


@pytest.fixture
def opening_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(self: Opening) -> None:
        self._sample_s, self._open_s, self._first = 1e-9, 1e6, None
        self.learn = lambda *_: None  # type: ignore[method-assign]

    monkeypatch.setattr(Opening, "__init__", known)


def numbers_of(samples: Sequence[Mapping[str, Any]]) -> list[int]:
    return [sample["n"] for sample in samples]


def opened(folder: Path) -> Counter[int]:
    return Counter(int(line.split()[0]) for line in (folder / "opened").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.usefixtures("opening_takes_long")
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_each_block_is_opened_once_by_two_workers(files: list[str], tmp_path: Path, is_shuffled: bool) -> None:
    data, options = hr.stream(files, format=Counted(tmp_path)), {"collate_fn": numbers_of, "num_workers": 2, "seed": 1}
    # prefetch_factor: one batch for each task, as rows that a task of several has not finished are decoded again
    with hr.DataLoader(data, BATCH, is_shuffled, prefetch_factor=2, **options) as loader:
        got = [n for batch in loader for n in batch]
    assert sorted(got) == list(range(ROWS))
    assert is_shuffled or got == sorted(got)
    assert opened(tmp_path) == Counter(dict.fromkeys(range(ROWS // GROUP), 1))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [["n"], ["n", "text"]])
def test_worker_opens_a_block_once_for_all_its_windows(files: list[str], tmp_path: Path, columns: list[str]) -> None:
    """Windows of 50 rows and groups of 60: nearly each group is in two or three."""
    data = hr.stream(files, format=Counted(tmp_path)).select(*columns).shuffle("window", window=50, seed=1)
    with hr.DataLoader(data, batch_size=BATCH, collate_fn=list, num_workers=1) as loader:
        got = [sample for batch in loader for sample in batch]
        assert sorted(numbers_of(got)) == list(range(ROWS))
        assert all(sample.get("text", f"row {sample['n']}") == f"row {sample['n']}" for sample in got)
        assert opened(tmp_path) == Counter(dict.fromkeys(range(ROWS // GROUP), 1))
        assert sorted(n for batch in loader for n in numbers_of(batch)) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.usefixtures("opening_takes_long")
@pytest.mark.filterwarnings("ignore")
def test_samples_are_right_where_the_worker_that_has_a_block_dies(files: list[str], tmp_path: Path) -> None:
    data = hr.stream(files, format=Counted(tmp_path, dies_at=3))
    with hr.DataLoader(data, batch_size=BATCH, collate_fn=numbers_of, num_workers=2) as loader:
        assert [n for batch in loader for n in batch] == list(range(ROWS))
        assert loader.stats().work.deaths == 1
    assert (tmp_path / "died").exists()
    assert opened(tmp_path)[3] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_first_sample_of_a_block_that_ends_its_workers_is_named(files: list[str], tmp_path: Path) -> None:
    data = hr.stream(files, format=Counted(tmp_path, dies_at=3, is_deadly=True))
    with hr.DataLoader(data, batch_size=ROWS, collate_fn=numbers_of, num_workers=1) as loader:
        with pytest.raises(hr.errors.WorkerDiedError, match=f"all on sample {3 * GROUP} of the epoch, key"):
            next(iter(loader))


class Held:
    """Holds one worker up at a sample, until the other one has made some of a later batch of the same block.

    It is not the next batch, which the same worker may have already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        goes_on = Path(f"{self.folder}/goes_on")
        if sample["n"] == GROUP + 10:
            while not goes_on.exists():
                time.sleep(0.01)
        if sample["n"] == GROUP + 40:
            goes_on.touch()
        return sample


def test_samples_of_a_block_whose_worker_is_held_up_go_to_the_other(files: list[str], tmp_path: Path) -> None:
    data = hr.stream(files, format=Counted(tmp_path)).map(Held(tmp_path))
    with hr.DataLoader(data, batch_size=BATCH, collate_fn=numbers_of, num_workers=2) as loader:
        assert [n for batch in loader for n in batch] == list(range(ROWS))
