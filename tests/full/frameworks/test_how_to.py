"""The code of the how-to page runs; the tests of the documentation only compile it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "frameworks.md"
BLOCKS = re.findall(r"^```python[^\n]*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_of_the_page_runs(
    number: int, digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(BLOCKS[number])
    digits.write_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = runpy.run_path(str(script), run_name="__main__")
    if accelerator := names.get("accelerator"):
        accelerator.free_memory()


@pytest.mark.parametrize("name", ["lightning", "lightning.Fabric", "accelerate", "transformers", "torchtitan"])
def test_page_shows_code_for_each_framework(name: str) -> None:
    assert any(name in block for block in BLOCKS)
