"""All targets by name."""

from __future__ import annotations

import importlib
from typing import Any

CHANGES = {
    "tar_reader": 2000, "indexes": 8000, "decoders": 6000, "columns": 6000, "decompression": 1500, "json_lines": 3000,
    "delimited": 1500, "plain_text": 1500, "mds": 2000, "tokens": 2000, "parquet": 800, "arrows": 2000,
    "litdata": 2000, "tfrecord": 4000, "mp4": 800, "zips": 3000, "safetensors": 3000, "energon": 1000,
}  # fmt: skip
"""The modules here that are targets, and how many changed seeds `test_targets.py` tries."""


def target(name: str) -> Any:
    """A module with two functions: `seeds()` gives inputs to begin with, whose first bytes choose what is done with the
    rest, and `check(data)` takes any input."""
    return importlib.import_module(f"full.fuzz.{name}")
