"""The fuzz targets over their seeds, and over the same pseudo-random changes of them in every run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from full.fuzz.dice import changed
from full.fuzz.targets import NAMES, target

CHANGED = {
    "tar_reader": 2000,
    "indexes": 8000,
    "decoders": 6000,
    "columns": 6000,
    "decompression": 1500,
    "json_lines": 3000,
    "delimited": 1500,
    "plain_text": 1500,
    "mds": 2000,
    "tokens": 2000,
    "parquet": 800,
    "arrows": 2000,
    "litdata": 2000,
    "tfrecord": 4000,
    "mp4": 800,
    "zips": 3000,
    "safetensors": 3000,
    "energon": 1000,
}


@pytest.mark.filterwarnings("ignore")  # Pillow warns of odd files that it reads all the same
@pytest.mark.parametrize("name", NAMES)
def test_reader_keeps_its_promises_when_its_input_is_changed(name: str) -> None:
    check, source = target(name).check, random.Random(name)
    seeds = list(target(name).seeds())
    for seed in seeds:
        check(seed)
    for number in range(CHANGED[name]):
        data = changed(source.choice(seeds), source)
        try:
            check(data)
        except Exception as error:
            error.add_note(f"change {number} of target {name}: {data!r}")
            raise


def test_every_module_with_seeds_is_a_target() -> None:
    modules = Path(__file__).parent.glob("*.py")
    assert {path.stem for path in modules if "\ndef seeds()" in path.read_text()} == set(NAMES) == CHANGED.keys()
