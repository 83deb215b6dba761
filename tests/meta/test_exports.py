"""The public names of `headrace` are those of `__all__`, and nothing else."""

import importlib.metadata
import inspect
import operator
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

NAMES = sorted(headrace.__all__)
NAMES_MOST = 42  # may only fall


@pytest.mark.parametrize("name", [*NAMES, *(f"plugins.{name}" for name in headrace.plugins.__all__)])
def test_name_resolves_and_has_a_docstring(name: str) -> None:
    value = operator.attrgetter(name)(headrace)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), f"headrace.{name} has no docstring"


def test_names_are_few_and_given_once() -> None:
    assert len(NAMES) == len(set(NAMES)) <= NAMES_MOST


def test_misspelt_method_of_a_stream_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'shufle'\. Did you mean: 'shuffle'\?"):
        headrace.from_map([1]).shufle()


def test_nothing_else_is_public() -> None:
    """Imports of the module's own code are not public: neither `dir` nor a star gives them."""
    star: dict[str, object] = {}
    exec("from headrace import *", star)

    assert {name for name in dir(headrace) if not name.startswith("_")} == {*NAMES, "errors", "plugins"}
    assert star.keys() - {"__builtins__"} == set(NAMES)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        headrace.no_such_name  # noqa: B018


def test_version_is_that_of_the_installed_package() -> None:
    assert headrace.__version__ == importlib.metadata.version("headrace")
    assert "__version__" in dir(headrace)


def test_sources_that_are_not_installed_have_no_known_version(tmp_path: Path) -> None:
    shutil.copytree(Path(headrace.__file__).parent, tmp_path / "headrace", ignore=shutil.ignore_patterns("*.pyc"))
    script = "import sys; sys.path.insert(0, sys.argv[1]); import headrace; print(headrace.__version__)"
    bare = [sys.executable, "-I", "-S", "-c", script, str(tmp_path)]  # without the folder of what is installed
    assert subprocess.run(bare, capture_output=True, text=True, check=True).stdout.strip() == "0+unknown"
