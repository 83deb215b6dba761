"""`import headrace` is light, and programs import what they use."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

HEAVY = {"torch", "fsspec", "obstore", "aiofiles"}
MOST_MODULES = 156  # in the trainer, until the first batch of images in folders; may only fall
PROBE = """
import json, sys, time
before = time.process_time()
import headrace
print(json.dumps({"cpu_s": time.process_time() - before, "modules": sorted(sys.modules)}))
"""
IMAGES = """
import sys, headrace as hr
images = hr.folder(sys.argv[1]).shuffle().decode("torch", size=(224, 224)).to_tuple("image", "label")
with hr.DataLoader(images, batch_size=32, num_workers=2) as loader:
    next(iter(loader))
    print(*(name for name in sys.modules if name.partition(".")[0] == "headrace"))
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=50).stdout


@pytest.fixture(scope="module")
def probes() -> list[dict]:
    return [json.loads(run(PROBE)) for _ in range(6)][1:]


def test_import_leaves_heavy_libraries_alone(probes: list[dict]) -> None:
    assert HEAVY.isdisjoint(probes[0]["modules"])


def test_import_costs_less_than_150_ms_of_cpu(probes: list[dict]) -> None:
    assert statistics.median(probe["cpu_s"] for probe in probes) < 0.150


def test_program_that_reads_images_imports_only_what_it_uses(tmp_path: Path) -> None:
    for number in range(32):
        (tmp_path / f"class{number % 2}").mkdir(exist_ok=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / f"class{number % 2}" / f"{number}.jpg")
    names = run(IMAGES, str(tmp_path)).split()
    unused = (
        "torch_regime",
        "fetch.web",
        "formats.tar",
        "formats.parquet",
        "sample_cache",
        "cli",
        "readers.sequential",
    )
    assert [name for name in names if name.removeprefix("headrace.").startswith(unused)] == []
    assert len(names) <= MOST_MODULES, "\n".join(names)


def test_what_works_on_streams_in_workers_imports_no_torch() -> None:
    names = "workers.forkserver.inheritance, workers.worker_main, torch_compat.errors, torch_compat.collate_by_torch"
    imports = "; ".join(f"import headrace.{name.strip()}" for name in names.split(","))
    imported = run(f"import sys; {imports}; print(*sys.modules)").split()
    assert "headrace.workers.chain_runner" in imported
    assert "torch" not in imported
