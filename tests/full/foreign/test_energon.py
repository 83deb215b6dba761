"""Shards that Megatron-Energon prepared are read by its indexes: `nox -s foreign` installs it."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import headrace as hr

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-Energon is not installed"
)

WRITE = Path(__file__).with_name("write_energon.py")
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with names that need extended headers, folders, and members that are of no sample."""
    folder = tmp_path_factory.mktemp("energon")
    for k, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT) * 2):
        with tarfile.open(folder / f"part_{k}.tar", "w", format=form) as archive:
            for n in range(5 + k):
                long = "" if form == tarfile.USTAR_FORMAT or n % 3 else "long/" * 40
                names = [f"{long}{k}_{n}.jpg", f"{long}{k}_{n}.Json", ".hidden"]
                for name, body in zip(names, (bytes(100 * n), f"{k}_{n}".encode(), b"x"), strict=True):
                    member = tarfile.TarInfo(name)
                    member.size = len(body)
                    archive.addfile(member, io.BytesIO(body))
    # of its own: it starts processes, and warns
    subprocess.run([sys.executable, "-W", "ignore", str(WRITE), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("split", SPLITS)
def test_split_has_the_samples_of_the_archives(prepared: Path, split: str) -> None:
    shards = [str(prepared / name) for name in (prepared / f"{split}.txt").read_text().split()]
    by_scan = list(hr.stream(shards, index=None))
    data = hr.energon(prepared, split=split)
    by_index = list(data)
    assert len(data) == len(by_index) == len(by_scan)
    for one, other in zip(by_index, by_scan, strict=True):
        assert {name: one[name] for name in ("jpg", "json")} == {name: other[name] for name in ("jpg", "json")}
    told = [sample["json"] for sample in by_scan]
    assert sorted(sample["json"] for sample in data.shuffle("global")) == sorted(told)
    assert data[-1]["json"] == told[-1]


def test_splits_divide_the_shards(prepared: Path) -> None:
    told = [sample["json"] for split in SPLITS for sample in hr.energon(prepared, split=split)]
    assert sorted(told) == sorted(f"{k}_{n}".encode() for k in range(6) for n in range(5 + k))
