"""Every Python block of the README, llms.txt and the docs runs as it stands, as a script of its own.

The working folder holds `shards/`: the digits as tar shards, as `python examples/digits.py shards` would write them.
For README and llms.txt it holds `photos/` and `texts/` too, and the names `tokenizer` and `dataset` exist.
A block that begins with ```python {test="skip"} is compiled only.
"""

import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

ROOT = Path(__file__).parents[2]
SHORT = [ROOT / "README.md", ROOT / "llms.txt"]  # their blocks read data of the reader's own
PAGES = [*SHORT, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python(?P<settings>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks() -> list[object]:
    """(page, line of the fence, settings, code) of each block. Those of docs/ are slow."""
    found = []
    for page in PAGES:
        text, marks = page.read_text(), [pytest.mark.slow] if "docs" in page.parts else []
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(page, line, *match.groups(), id=f"{name_of(page)}:{line}", marks=marks))
    return found


@pytest.fixture(scope="module")
def written_shards(digits: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "shards"
    digits.write_shards(folder)
    return folder


def write_readers_data(folder: Path) -> dict[str, object]:
    """Write photos and texts; return the objects that the blocks expect."""
    for number, (kind, suffix) in enumerate([("cat", "jpg"), ("cat", "png"), ("dog", "jpg"), ("dog", "png")] * 8):
        (folder / "photos" / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (number, 0, 0)).save(folder / "photos" / kind / f"{number}.{suffix}")
    (folder / "texts").mkdir()
    for shard in range(2):
        rows = pa.table({"text": ["some words " * 150] * 100})
        pyarrow.parquet.write_table(rows, folder / "texts" / f"{shard}.parquet")
    tokenizer = Tokenizer(WordLevel({"some": 0, "words": 1}, unk_token="some"))
    tokenizer.pre_tokenizer = Whitespace()
    return {"tokenizer": tokenizer, "dataset": torch.utils.data.TensorDataset(torch.arange(100))}


@pytest.mark.parametrize(("page", "line", "settings", "code"), blocks())
def test_block_runs(
    page: Path, line: int, settings: str, code: str, written_shards: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n" * line + code)  # a traceback shows the lines of the page
    if 'test="skip"' in settings:
        compile(script.read_text(), script, "exec")
        return
    shutil.copytree(written_shards, tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    for registry in ("fetch.stores.addresses", "formats.decoders", "ops.registry", "formats.registry"):
        monkeypatch.setattr(f"headrace.{registry}._registered", {})  # what a page registers is for it alone
    expects = write_readers_data(tmp_path) if page in SHORT else {}
    ran = runpy.run_path(str(script), init_globals=expects, run_name="__main__")
    if page.name == "README.md":
        with ran["loader"] as loader:
            assert next(iter(loader)) is not None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere_and_its_blocks_are_run(page: Path) -> None:
    text = page.read_text()  # a block fenced in another way, or indented, would rot unseen
    fences = re.findall(r"^[ \t]*(?:```|~~~)[ \t{.]*(?:python|py3?|pycon)\b", text, re.MULTILINE)
    assert len(fences) == len(BLOCK.findall(text))
    prose = re.sub(r"^```[\s\S]*?^```", "", text, flags=re.MULTILINE)
    targets = re.findall(r'(?:\]\(|src="|srcset=")([^)"#\s]+)', prose)
    assert not [target for target in targets if "://" not in target and not (page.parent / target).exists()]


def test_readme_begins_with_code_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert text.count("```python", 0, len("\n".join(text.splitlines()[:24]))) == 3
    prose = re.sub(r"^```[\s\S]*?^```|^[|<].*|`[^`]*`|\]\([^)]*\)", "x", text, flags=re.MULTILINE)
    sentences = re.split(r"[.:!?;](?:\s|$)|\n[\n*#]", prose)
    assert not [sentence for sentence in sentences if len(sentence.split()) > 25]
