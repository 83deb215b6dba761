"""A changelog fragment is one sentence of at most 100 characters, of a type that towncrier knows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
