"""Zarr's arrays through our stores: on the loader's loop, on Zarr's own, and what is refused."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.testing import FaultServer

zarr = pytest.importorskip("zarr")

from headrace.sources.zarr_store import ZarrStore  # noqa: E402

pytestmark = pytest.mark.may_leave(
    threads="zarr_.*|asyncio_.*",
    descriptors="socket|eventpoll",
    mappings=r"/dev/shm/sem\.",
    reason="Zarr keeps a loop with its threads for its synchronous functions, and numcodecs a lock",
)

COUNT = 60
VALUES = np.arange(COUNT * 12, dtype=np.float32).reshape(COUNT, 3, 4)


class Rows(hr.AsyncDataset):
    def __init__(self, url: str) -> None:
        self.store = ZarrStore(url)

    def __len__(self) -> int:
        return COUNT

    async def aopen(self) -> None:
        self.array = await zarr.api.asynchronous.open_array(store=self.store, mode="r")

    async def aget(self, key: int) -> Any:
        return await self.array.getitem(key)


@pytest.fixture(params=[{}, {"shards": (20, 3, 4)}, {"zarr_format": 2}], ids=["chunks", "shards", "version 2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    zarr.create_array(tmp_path / "a.zarr", data=VALUES, chunks=(5, 3, 4), **request.param)
    return tmp_path / "a.zarr"


def served(server: FaultServer, folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            server.add(f"a.zarr/{path.relative_to(folder)}", path.read_bytes())
    return f"{server.url}/a.zarr"


def test_array_is_what_was_written(folder: Path) -> None:
    array = zarr.open_array(ZarrStore(str(folder)), mode="r")
    assert (array[:] == VALUES).all()
    assert (array[41] == VALUES[41]).all()


def test_rows_come_by_the_loaders_own_reader(folder: Path) -> None:
    with FaultServer() as server:
        url = served(server, folder)
        with hr.DataLoader(Rows(url), batch_size=7, shuffle=True) as loader:
            batches = [batch.numpy() for batch in loader]
            read = loader.stats().fetch.requests
        rows = np.concatenate(batches)
        assert sorted(rows[:, 0, 0].tolist()) == VALUES[:, 0, 0].tolist()
        assert all((row == VALUES[int(row[0, 0]) // 12]).all() for row in rows)
        assert read >= COUNT, "they are counted with the loader's"


def test_chunks_that_are_not_there_are_filled(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(6,), chunks=(2,), dtype="i4", fill_value=9)[0:2] = 1
    assert zarr.open_array(ZarrStore(str(tmp_path / "a.zarr")), mode="r")[:].tolist() == [1, 1, 9, 9, 9, 9]


def test_group_is_found_by_its_consolidated_metadata(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g.zarr", zarr_format=2)
    group.create_array("deep/x", data=VALUES)
    zarr.consolidate_metadata(tmp_path / "g.zarr", zarr_format=2)
    opened = zarr.open_group(ZarrStore(str(tmp_path / "g.zarr")), mode="r", use_consolidated=True)
    assert (opened["deep/x"][3] == VALUES[3]).all()
    assert "x" in opened["deep"]


def test_store_travels_and_neither_writes_nor_lists(folder: Path) -> None:
    store = ZarrStore(f"{folder}/")
    assert pickle.loads(pickle.dumps(store)) == store
    assert store.read_only
    assert str(folder) in repr(store)
    with pytest.raises(ValueError, match=r"read.only"):
        zarr.create_array(store, name="b", shape=(3,), dtype="i4")
    with pytest.raises(NotImplementedError, match="neither writes nor lists"):
        store.list()
    with pytest.raises(FileNotFoundError):
        zarr.open_array(ZarrStore(f"{folder}/nothing"), mode="r")
