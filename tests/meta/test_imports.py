"""`import headrace` is light and gives the names of `__all__` only. Programs import what they use."""

import importlib.metadata
import inspect
import json
import operator
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace

NAMES = sorted(headrace.__all__)
HEAVY = {"torch", "fsspec", "obstore", "aiofiles"}
MOST_NAMES = 45  # may only fall
MOST_MODULES = 110  # in the trainer, until the first batch of images in folders; may only fall
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


def run(code: str, *arguments: str, flags: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *flags, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=50).stdout


def test_import_leaves_heavy_libraries_alone_and_costs_less_than_150_ms_of_cpu() -> None:
    probes = [json.loads(run(PROBE)) for _ in range(6)][1:]
    assert HEAVY.isdisjoint(probes[0]["modules"])
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
    names = "workers.forkserver.inheritance, workers.worker_main, torch_compat.serialize, torch_compat.collate_by_torch"
    imports = "; ".join(f"import headrace.{name.strip()}" for name in names.split(","))
    imported = run(f"import sys; {imports}; print(*sys.modules)").split()
    assert "headrace.workers.chain_runner" in imported
    assert "torch" not in imported


@pytest.mark.parametrize("name", [*NAMES, *(f"plugins.{name}" for name in headrace.plugins.__all__)])
def test_name_resolves_and_has_a_docstring(name: str) -> None:
    value = operator.attrgetter(name)(headrace)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), f"headrace.{name} has no docstring"


def test_nothing_else_is_public() -> None:
    """Imports of the module's own code are not public: neither `dir` nor a star gives them."""
    star: dict[str, object] = {}
    exec("from headrace import *", star)
    assert {name for name in dir(headrace) if not name.startswith("_")} == {*NAMES, "errors", "plugins"}
    assert len(NAMES) == len(set(NAMES)) <= MOST_NAMES
    assert star.keys() - {"__builtins__"} == set(NAMES)


def test_misspelt_method_of_a_stream_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'shufle'\. Did you mean: 'shuffle'\?"):
        headrace.from_map([1]).shufle()


def test_version_is_that_of_the_installed_package() -> None:
    assert headrace.__version__ == importlib.metadata.version("headrace")
    assert "__version__" in dir(headrace)
    with pytest.raises(AttributeError, match="no_such_name"):
        headrace.no_such_name  # noqa: B018


def test_sources_that_are_not_installed_have_no_known_version(tmp_path: Path) -> None:
    shutil.copytree(Path(headrace.__file__).parent, tmp_path / "headrace", ignore=shutil.ignore_patterns("*.pyc"))
    script = "import sys; sys.path.insert(0, sys.argv[1]); import headrace; print(headrace.__version__)"
    version = run(script, str(tmp_path), flags=("-I", "-S"))  # without the folder of what is installed
    assert version.strip() == "0+unknown"
