"""The README's pictures are those of the tables in the docs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_colour_of_a_cell_follows_its_verdict(pictures: ModuleType) -> None:
    kinds = {
        "exact": "exact",
        "exact, other order in batches": "order",
        "none lost, other order": "order",
        "151 lost, 1 twice": "loses",
        "0 lost, 8 twice": "loses",
        "raises AssertionError": "raises",
        "hangs for 180 s": "raises",
        "no state": "none",
    }
    assert {text: pictures.verdict_kind(text) for text in kinds} == kinds


def test_grid_has_the_words_and_colours_of_the_table(pictures: ModuleType) -> None:
    rows = [["", "same settings", "ranks 2 → 3, global batch 24"], ["A <b> (1.0)", "exact", "444 lost, 0 twice"]]
    for theme in (pictures.LIGHT, pictures.DARK):
        drawn = pictures.resume_grid(rows, theme)
        assert all(f">{text}<" in drawn for text in ("A &lt;b&gt;", "1.0", "exact", "444 lost", "0 twice", "ranks 2→3"))
        assert drawn.count(f'fill="{theme.verdicts["loses"][0]}"') == 1 + 1  # and one in the legend
