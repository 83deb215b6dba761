"""Folders that LitData wrote are read as LitData reads them: `nox -s foreign` installs it."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.testing.decoders import same

pytestmark = pytest.mark.skipif(importlib.util.find_spec("litdata") is None, reason="LitData is not installed")

SETS = ["numbers", "tuples", "mixed", "tensors", "rows", "packed_rows", "nested"]
SETS += [f"in_{how}" for how in ("chunk", "batch", "sample", "frames")]
WRITE = Path(__file__).with_name("write_litdata.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("litdata")
    # of its own: it starts threads, and warns
    subprocess.run([sys.executable, "-W", "ignore", str(WRITE), str(folder)], check=True, capture_output=True)
    return folder


def samples_of(written: Path, name: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """The fields that headrace reads, and the samples that LitData has read."""
    expected = pickle.loads((written / f"{name}.pickle").read_bytes())
    data = hr.stream(str(written / name))
    got = [{key: value for key, value in one.items() if not key.startswith("__")} for one in data]
    assert len(expected) == len(data) == len(got)
    return got, expected


@pytest.mark.parametrize("name", SETS)
def test_samples_are_as_litdata_reads_them(written: Path, name: str) -> None:
    got, expected = samples_of(written, name)
    assert all(map(same, got, map(_as_fields, expected)))


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="LitData reads Parquet by Polars")
def test_parquet_files_are_read_by_litdatas_index_as_litdata_reads_them(written: Path) -> None:
    got, expected = samples_of(written, "tables")
    assert all(map(same, map(_plain, got), expected))


def _plain(value: Any) -> Any:
    """Lists for arrays: LitData gives the one, and headrace the other."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def _as_fields(item: Any) -> dict[str, Any]:
    if isinstance(item, dict):
        return item
    return {str(k): value for k, value in enumerate(item)} if isinstance(item, tuple | list) else {"value": item}
