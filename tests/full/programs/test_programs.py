"""Programs run twice, with torch's DataLoader and with ours: whatever a program can see must be the same.

To add a program, write one function with `@program` into the file of its family, or into a new one. To look at one:

    python tests/full/programs/FAMILY.py torch - NAME
    python tests/full/programs/FAMILY.py headrace - NAME
"""

from __future__ import annotations

import ast
import difflib
import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full.programs.watching import ENDED_BY

pytestmark = [
    pytest.mark.timeout(2000),  # the first test of a family waits for all of its programs
    pytest.mark.may_leave(files="^pymp-", reason="torch's workers were terminated"),
]

HERE = Path(__file__).parent
SIDES = ("torch", "headrace")
LIMIT_S = 900  # for all programs of a family; they take some seconds where nothing else runs


def _programs_of(family: Path) -> list[str]:
    functions = [node for node in ast.parse(family.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(isinstance(d, ast.Name) and d.id == "program" for d in f.decorator_list)]


PROGRAMS = [
    pytest.param(family.stem, name, id=f"{family.stem}-{name}")
    for family in sorted(HERE.glob("*.py"))
    for name in _programs_of(family)
]


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], dict[str, dict[str, Any]]]:
    """The notes of a family's programs with each class; a family runs once for all processes of the tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "programs"
    folder.mkdir(exist_ok=True)

    def records_of(family: str) -> dict[str, dict[str, Any]]:
        with (folder / f"{family}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"{family}.json").exists():
                (folder / f"{family}.json").write_text(json.dumps(_run(family, folder)))
            return json.loads((folder / f"{family}.json").read_text())

    return records_of


def _run(family: str, folder: Path) -> dict[str, dict[str, Any]]:
    running = {}
    for side in SIDES:
        place = folder / f"{family}-{side}"
        place.mkdir()
        running[side] = subprocess.Popen(
            [sys.executable, HERE / f"{family}.py", side, folder / f"{family}.{side}"],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    told = {}
    for side, process in running.items():
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        notes = folder / f"{family}.{side}"
        told[side] = {"said": said, "notes": json.loads(notes.read_text()) if notes.exists() else {}}
    return told


@pytest.mark.parametrize(("family", "name"), PROGRAMS)
def test_program_sees_the_same_with_either_class(
    records: Callable[[str], dict[str, dict[str, Any]]], family: str, name: str
) -> None:
    told = records(family)
    for side in SIDES:
        assert name in told[side]["notes"], f"it did not end well with {side}'s class:\n{told[side]['said']}"
    theirs, ours = (told[side]["notes"][name] for side in SIDES)
    assert len(theirs) > 1, "a program that notes nothing compares nothing"
    assert not any(line.startswith(ENDED_BY) for line in theirs), f"it fails with torch's class: {theirs[-2:]}"
    assert theirs == ours, "\n".join(difflib.unified_diff(theirs, ours, *SIDES, lineterm="", n=1))


@pytest.mark.parametrize("family", sorted({param.values[0] for param in PROGRAMS}))
def test_programs_say_the_same_on_standard_output_and_error(
    records: Callable[[str], dict[str, dict[str, Any]]], family: str
) -> None:
    theirs, ours = (sorted(filter(_is_said, records(family)[side]["said"].splitlines())) for side in SIDES)
    assert theirs == ours


def _is_said(line: str) -> bool:
    """Not of a warning in a worker: those that come once in a process came in the trainer, where torch's are forked."""
    return not line.startswith(" ") and not re.search(r":\d+: (?!Resource)\w+Warning: ", line)
