"""`import headrace` is light."""

import json
import statistics
import subprocess
import sys

import pytest

HEAVY = {"torch", "fsspec", "obstore", "aiofiles"}
PROBE = """
import json, sys, time
before = time.process_time()
import headrace
print(json.dumps({"cpu_s": time.process_time() - before, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def probes() -> list[dict]:
    """What five fresh interpreters say; the one before them fills the caches of byte code and of the disk."""

    def ask() -> dict:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=50)
        return json.loads(done.stdout)

    ask()
    return [ask() for _ in range(5)]


def test_import_leaves_heavy_libraries_alone(probes: list[dict]) -> None:
    assert HEAVY.isdisjoint(probes[0]["modules"])


def test_import_costs_less_than_150_ms_of_cpu(probes: list[dict]) -> None:
    assert statistics.median(probe["cpu_s"] for probe in probes) < 0.150


@pytest.mark.slow
def test_loaders_import_no_format_before_one_is_needed() -> None:
    probe = "import sys, headrace.loader; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=50)
    formats = {f"headrace.formats.{name}" for name in ("registry", "parquet", "mds", "litdata", "zip", "mp4", "arrow")}
    assert formats.isdisjoint(done.stdout.split())


def test_what_works_on_streams_in_workers_imports_no_torch() -> None:
    names = "processes.inheritance, work.worker, torch_compat.errors, torch_compat.collate_by_torch"
    imports = "; ".join(f"import headrace.{name.strip()}" for name in names.split(","))
    probe = f"import sys; {imports}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=50)
    assert "headrace.work.maker" in done.stdout.split()
    assert "torch" not in done.stdout.split()
