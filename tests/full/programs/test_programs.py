"""Programs run twice, with torch's DataLoader and with ours: whatever a program can see must be the same.

To add a program, write one function with `@program` into the file of its family, or into a new one. To look at one:

    python tests/full/programs/FAMILY.py torch - NAME
    python tests/full/programs/FAMILY.py headrace - NAME
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from full.programs.watching import ENDED_BY

pytestmark = [
    pytest.mark.timeout(2000),
    pytest.mark.may_leave(files="^pymp-", reason="torch's workers were terminated"),
]

HERE = Path(__file__).parent
SIDES = ("torch", "headrace")
LIMIT_S = 900  # for all programs of a family; they take some seconds where nothing else runs
PROGRAMS = {
    path.stem: re.findall(r"^@program\ndef (\w+)", path.read_text(), re.MULTILINE) for path in HERE.glob("*.py")
}


def run(family: str, folder: Path) -> None:
    """Write what the programs note to SIDE.json, and what they print to SIDE.txt."""
    processes = []
    for side in SIDES:
        (folder / side).mkdir()
        command = [sys.executable, HERE / f"{family}.py", side, folder / f"{side}.json"]
        with (folder / f"{side}.txt").open("w") as output:
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(command, cwd=folder / side, **files))
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        process.kill()
        process.wait()


@pytest.mark.parametrize("family", sorted(family for family, names in PROGRAMS.items() if names))
def test_programs_note_and_print_the_same_with_either_class(family: str, tmp_path: Path) -> None:
    run(family, tmp_path)
    printed = {side: (tmp_path / f"{side}.txt").read_text() for side in SIDES}
    notes = {}
    for side in SIDES:
        record = tmp_path / f"{side}.json"
        notes[side] = json.loads(record.read_text()) if record.exists() else {}
        assert list(notes[side]) == PROGRAMS[family], f"not all ended well with {side}'s class:\n{printed[side]}"
    theirs, ours = (notes[side] for side in SIDES)
    for name, lines in theirs.items():
        assert len(lines) > 1, f"{name} compares nothing"
        assert not any(line.startswith(ENDED_BY) for line in lines), f"{name} fails with torch's class: {lines[-2:]}"
    different = [
        f"{name}:\n" + "\n".join(difflib.unified_diff(theirs[name], ours[name], *SIDES, lineterm="", n=1))
        for name in theirs
        if theirs[name] != ours[name]
    ]
    assert not different, "\n".join(different)
    theirs_printed, ours_printed = (
        sorted(filter(_is_printed, ENDS_OF_COPIES.sub("", printed[side]).splitlines())) for side in SIDES
    )
    assert theirs_printed == ours_printed


# torch's iterator may print this where a forked worker frees its copy of another iterator.
ENDS_OF_COPIES = re.compile(
    r"Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at \w+>\n"
    r"Traceback .*\n(?: .*\n)+AssertionError: can only test a child process\n"
)


def _is_printed(line: str) -> bool:
    """Not of a warning in a worker: those that come once in a process came in the trainer, where torch's are forked."""
    return not line.startswith(" ") and not re.search(r":\d+: (?!Resource)\w+Warning: ", line)
