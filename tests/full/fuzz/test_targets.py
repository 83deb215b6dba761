"""The fuzz targets over their seeds, and over the same pseudo-random changes of them in every run."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from full.fuzz.dice import changed
from full.fuzz.targets import CHANGES, target


@pytest.mark.filterwarnings("ignore")  # Pillow warns of odd files that it reads all the same
@pytest.mark.parametrize("name", CHANGES)
def test_reader_keeps_its_promises_when_its_input_is_changed(name: str) -> None:
    check, source = target(name).check, random.Random(name)
    seeds = list(target(name).seeds())
    for seed in seeds:
        check(seed)
    for number in range(CHANGES[name]):
        data = changed(source.choice(seeds), source)
        try:
            check(data)
        except Exception as error:
            error.add_note(f"change {number} of target {name}: {data!r}")
            raise


def test_every_module_with_seeds_is_a_target() -> None:
    texts = {path.stem: path.read_text() for path in Path(__file__).parent.glob("*.py")}
    found = {name for name, text in texts.items() if re.search("^(def seeds|seeds =)", text, re.MULTILINE)}
    assert found == CHANGES.keys()
