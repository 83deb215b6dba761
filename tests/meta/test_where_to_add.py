"""The page "where to add" names what exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_files_that_the_maps_name_exist() -> None:
    maps = (ROOT / "docs/explanation/architecture.md").read_text() + (SOURCES / "README.md").read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|md)|[\w]+/\w+)`", maps))
    assert {name for name in named if not (ROOT / name).exists() and not (SOURCES / name).exists()} == set()


def test_what_the_page_names_exists() -> None:
    assert [name for name in NAMES if not exists(name)] == []


def test_page_has_a_row_for_each_contract_and_each_way_to_register() -> None:
    testing, public = importlib.import_module("headrace.testing"), importlib.import_module("headrace")
    contracts = {f"headrace.testing.{name}" for name in testing.__all__ if name.endswith("Contract")}
    ways = {f"hr.{name}" for name in public.__all__ if name.startswith("register_")}
    assert contracts | ways <= set(NAMES)
