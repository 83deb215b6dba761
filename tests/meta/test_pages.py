"""The README's commands and pictures, the changelog and the pages name what exists, in the form that tools expect."""

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MAKE = "python3 -m venv .venv && .venv/bin/python -m pip install nox"


def commands() -> list[str]:
    """The commands of the README's block of shell commands, without their comments."""
    block = re.search(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return [" ".join(shlex.split(line, comments=True)) for line in block[1].splitlines()]


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def test_commands_and_contributing_make_the_environment_that_they_use() -> None:
    assert commands() == [f"{MAKE} && .venv/bin/nox -s {session}" for session in ("demo", "tests")]
    first, activate, *_ = re.findall(r"^    (\S.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert first == MAKE
    assert activate.startswith(". .venv/bin/activate")


def test_ci_installs_the_locked_environment_before_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    make, _, run = commands()[1].rpartition(" && ")
    locked = f"{make} -c requirements/nox.txt"
    assert script.index(f"\n({locked}) ") < script.index(f"\n{run} ") < script.index("\n.venv/bin/nox -R -s full ")
    assert 'beside_the_tests "$check" &' in script


@pytest.mark.parametrize("fails", [
    "nothing", "-s tests", "-R -s full", "-s types", "-s frameworks --install-only", "-R -s frameworks",
])  # fmt: skip
def test_ci_runs_every_check_and_fails_with_each_of_them(tmp_path: Path, fails: str) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    nox = f'#!/bin/sh\necho "runs: $*"\necho "= 5 passed in 3s ="\ncase "$*" in "{fails}"*) exit 1;; esac\n'
    python = "#!/bin/sh\nmkdir -p .venv/bin && cp bin/nox bin/python .venv/bin\n"
    (tmp_path / "bin").mkdir()
    for name, code in {"nox": nox, "python": "#!/bin/sh\n", "python3": python}.items():
        (tmp_path / "bin" / name).write_text(code)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == (0 if fails in ("nothing", "-s frameworks --install-only") else 1), run.stderr
    frameworks = "-R -s frameworks -- -k checkpoints"
    if fails == "-s frameworks --install-only":  # a failure of other projects is no fault
        frameworks = fails
    wanted = {"-s tests", "-R -s full", "-s lint", "-s types", "-s imports", "-s docs", frameworks}
    assert set(re.findall("runs: (.*)", run.stdout)) == wanted
    assert run.stdout.splitlines()[-1] == "= 5 passed in 3s ="


def test_sessions_that_are_named_anywhere_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", ".ci/run", "benchmarks/README.md"):
        for names in re.findall(r"nox -s ((?:[a-z_]+ ?)+)", (ROOT / page).read_text()):
            named = {name for name in names.split() if name in sessions()}
            assert names.split()[0] in named, f"{page}: nox -s {names}"


def test_no_page_has_pip_install_outside_of_an_environment() -> None:
    """The system's own `python3` refuses that on Debian, Ubuntu and others (PEP 668)."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", *(ROOT / "docs").rglob("*.md")]
    assert not [
        page for page in pages if re.search(r"python3 -m pip|^\s*pip3? install", page.read_text(), re.MULTILINE)
    ]


TOWNCRIER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]


def faults(name: str, text: str) -> list[str]:
    types = "|".join(kind["directory"] for kind in TOWNCRIER["type"])
    prose = re.sub(r"`[^`]*`", "code", text)
    found = {
        f"is not named +short-name.({types}).md": not re.fullmatch(rf"\+[a-z0-9_-]+\.({types})\.md", name),
        "has more than 100 characters": len(text.strip()) > 100,
        "is not one line": text.count("\n") > 1,
        "does not end with a full stop": not text.rstrip().endswith("."),
        "has more than one sentence": re.search(r"[.!?] +[^a-z]", prose) is not None,
    }
    return [fault for fault, applies in found.items() if applies]


def test_fragment_is_one_short_sentence() -> None:
    fragments = [path for path in (ROOT / TOWNCRIER["directory"]).iterdir() if path.name != "README.md"]
    found = {path.name: faults(path.name, path.read_text()) for path in fragments}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(("name", "text", "count"), [
    ("+gpu.added.md", "`device=` is tested on a GPU, e.g. an H100.\n", 0),
    ("+gpu.added.md", "`data[0]. X` is one piece of code.", 0),
    ("gpu.news.md", "One sentence.\n", 1),
    ("+gpu.added.md", "No full stop\n", 1),
    ("+gpu.added.md", "One sentence. And a second.\n", 1),
    ("+gpu.added.md", "One\nsentence.\n", 1),
    ("+gpu.added.md", "x" * 100 + ".\n", 1),
])  # fmt: skip
def test_check_finds_faults(name: str, text: str, count: int) -> None:
    """The folder may be empty, so the check has its own cases."""
    assert len(faults(name, text)) == count


def test_changelog_has_the_mark_below_which_towncrier_adds_a_release() -> None:
    assert TOWNCRIER["start_string"] in (ROOT / TOWNCRIER["filename"]).read_text()


SOURCES = ROOT / "src/headrace"
PAGE = ROOT / "docs/explanation/where_to_add.md"
ROWS = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", "|".join(row))})


def exists(name: str) -> bool:
    if "/" in name or name.endswith(".py") or name.isidentifier():
        return (SOURCES / name).exists() or name == "__sample_source__"
    if name.count(".") == 1 and name.startswith("headrace.") and name.endswith("s"):  # a group of entry points
        return any(f'"{name}"' in path.read_text() for path in (ROOT / "src").rglob("*.py"))
    module, _, attribute = name.removesuffix("()").replace("hr.", "headrace.", 1).rpartition(".")
    return hasattr(importlib.import_module(module), attribute) if module else attribute == "__sample_source__"


def test_files_and_names_on_the_pages_exist() -> None:
    maps = (ROOT / "docs/explanation/architecture.md").read_text() + (SOURCES / "README.md").read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|md)|[\w]+/\w+)`", maps))
    assert {name for name in named if not (ROOT / name).exists() and not (SOURCES / name).exists()} == set()
    assert [name for name in NAMES if not exists(name)] == []


def test_page_has_a_row_for_each_contract_and_each_way_to_register() -> None:
    testing, public = importlib.import_module("headrace.testing"), importlib.import_module("headrace")
    contracts = {f"headrace.testing.{name}" for name in testing.__all__ if name.endswith("Contract")}
    ways = {f"hr.{name}" for name in public.__all__ if name.startswith("register_")}
    assert contracts | ways <= set(NAMES)


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "readme_pictures.py"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_pictures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_picture_in_the_repository_is_that_of_the_page(pictures: ModuleType) -> None:
    drawn = pictures.pictures()
    old = [name for name, picture in drawn.items() if (pictures.IMAGES / name).read_text() != picture]
    assert not old, "run python benchmarks/readme_pictures.py"
