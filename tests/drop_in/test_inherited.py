"""What a data set of a script holds is in workers what it would be had they been forked from the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from drop_in import inherited

pytestmark = pytest.mark.timeout(300)  # the first one runs the script, a hundred loaders long


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, str]]:
    """Of each case what a fork of torch's says, and what a worker of ours does; the script is run once for all."""
    script = Path(inherited.__file__)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    return {name: (theirs, ours) for name, theirs, ours in map(json.loads, run.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("case", inherited.CASES)
def test_thing_that_a_data_set_holds_is_as_it_would_be_after_a_fork(
    told: dict[str, tuple[str, str]], case: str
) -> None:
    theirs, ours = told[case]
    assert "Error: " not in theirs, "the case itself is wrong"
    assert ours == theirs
