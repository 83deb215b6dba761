"""The commands that the README gives are those that CI runs, and CONTRIBUTING begins with."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

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


def test_each_of_the_two_commands_makes_the_environment_that_it_uses() -> None:
    assert commands() == [f"{MAKE} && .venv/bin/nox -s {session}" for session in ("demo", "tests")]


def test_ci_runs_the_readmes_test_command_and_every_other_check() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    make, _, run = commands()[1].rpartition(" && ")
    locked = f"{make} -c requirements/nox.txt"
    assert script.index(f"\n({locked}) ") < script.index(f"\n{run} ") < script.index("\n.venv/bin/nox -R -s full ")
    beside_one_another = re.search(r"^checks=\(([a-z_ ]+)\)$", script, re.MULTILINE)
    assert beside_one_another is not None
    assert set(beside_one_another[1].split()) == {"lint", "types", "imports", "docs"}
    assert 'beside_the_tests "$check" &' in script


@pytest.mark.parametrize(
    "fails", ["nothing", "-s tests", "-R -s full", "-s types", "-s frameworks --install-only", "-R -s frameworks"]
)
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

    run = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert run.returncode == (0 if fails in ("nothing", "-s frameworks --install-only") else 1), run.stderr
    ran = set(re.findall("runs: (.*)", run.stdout))
    wanted = {"-s tests", "-R -s full", "-s lint", "-s types", "-s imports", "-s docs"}
    wanted.add("-R -s frameworks -- -k checkpoints")
    if fails == "-s frameworks --install-only":  # a failure of other projects is no fault
        wanted = wanted - {"-R -s frameworks -- -k checkpoints"} | {fails}
    assert ran == wanted
    assert run.stdout.splitlines()[-1] == "= 5 passed in 3s ="


def test_contributing_begins_with_the_same_environment() -> None:
    first, activate, *_ = re.findall(r"^    (\S.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert first == MAKE
    assert activate.startswith(". .venv/bin/activate")


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
