"""Every Python block of the README and the docs runs as it stands, as a script of its own.

The working folder holds `shards/`: the digits as tar shards, as `python examples/digits.py shards` would write them.
A block that begins with ```python {test="skip"} is compiled only.
"""

import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python(?P<settings>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks() -> list[object]:
    """(page, line of the fence, settings, code) of each block."""
    return [
        pytest.param(page, line, match["settings"], match["code"], id=f"{name_of(page)}:{line}")
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        for line in [page.read_text().count("\n", 0, match.start()) + 1]
    ]


@pytest.fixture(scope="module")
def written_shards(digits: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "shards"
    digits.write_shards(folder)
    return folder


@pytest.mark.parametrize(("page", "line", "settings", "code"), blocks())
def test_block_runs(
    page: Path,
    line: int,
    settings: str,
    code: str,
    written_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n" * line + code)  # a traceback shows the lines of the page
    if 'test="skip"' in settings:
        compile(script.read_text(), script, "exec")
        return
    shutil.copytree(written_shards, tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace.fetch.stores.registry._registered", {})  # stores of a page are for it alone
    monkeypatch.setattr("headrace.formats.decoders._registered", {})
    monkeypatch.setattr("headrace.datasets.operators.registered._registered", {})
    monkeypatch.setattr("headrace.formats.registry._registered", {})
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_has_no_block_that_is_not_run(page: Path) -> None:
    """A block fenced in another way, or indented, would rot unseen."""
    text = page.read_text()
    fences = re.findall(r"^[ \t]*(?:```|~~~)[ \t{.]*(?:python|py3?|pycon)\b", text, re.MULTILINE)
    assert len(fences) == len(BLOCK.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```[\s\S]*?^```", "", page.read_text(), flags=re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
