"""Blocks of the README, llms.txt and the docs run, and so do examples. Docstrings and pages name what exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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

import headrace as hr
from headrace.dataset.operators import Operators
from headrace.formats import decoders
from headrace.formats import registry as formats_registry
from headrace.ops import registry as ops_registry

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
    """The block is a script of its own. Its folder holds `shards/`, as `python examples/digits.py shards` writes them.

    For README and llms.txt the folder holds `photos/` and `texts/` too, and `tokenizer` and `dataset` exist. A block
    that begins with ```python {test="skip"} is compiled only.
    """
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


PACKAGE = Path(__file__).parents[2] / "src"
SECTION = re.compile(r"^Args:\n((?:(?: {4}.*)?\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\S[^:]*):", re.MULTILINE)


def parameters(arguments: ast.arguments) -> set[str]:
    names = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    several = {"*": arguments.vararg, "**": arguments.kwarg}
    return names | {f"{stars}{a.arg}" for stars, a in several.items() if a is not None}


def described(tree: ast.AST) -> Iterator[tuple[str, str, set[str]]]:
    """(whose docstring, a name that it describes, the names that there are)."""
    for node in ast.walk(tree):
        makes: list[ast.stmt] = [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
        if isinstance(node, ast.ClassDef):
            makes = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in ("__init__", "__new__")]
        if makes and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            section = SECTION.search(ast.get_docstring(node) or "")
            known = parameters(makes[0].args)  # type: ignore[attr-defined]
            yield from ((node.name, name, known) for name in ENTRY.findall(section[1] if section else ""))


def test_each_parameter_has_a_line_of_its_own() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}: {whose}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for whose, name, known in described(ast.parse(path.read_text()))
        if name not in known
    ]
    assert not wrong


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text():
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
            yield from (
                found for found in finder.find(importlib.import_module(name), extraglobs={"hr": hr}) if found.examples
            )


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name.removeprefix("headrace."))
def test_example_runs(example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoders, formats_registry, ops_registry):  # other tests do not see what an example registers
        monkeypatch.setattr(module, "_registered", module._registered.copy())
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert not result.failed, "".join(told)


def test_each_public_name_and_method_has_an_example() -> None:
    blocks = "".join(match["code"] for page in PAGES for match in BLOCK.finditer(page.read_text()))
    public: dict[str, Any] = {f"hr.{name}": getattr(hr, name) for name in hr.__all__ if not name.endswith("Error")}
    methods = {f".{name}(": value for name, value in vars(Operators).items() if inspect.isfunction(value)}
    lacking = {name for name, value in public.items() if name not in blocks and ">>>" not in (value.__doc__ or "")}
    lacking |= {name for name, value in methods.items() if name[1] != "_" and ">>>" not in (value.__doc__ or "")}
    assert lacking == set()


MAKE = "python3 -m venv .venv && .venv/bin/python -m pip install nox"


def commands() -> list[str]:
    """The commands of the README's block of shell commands, without their comments."""
    block = re.search(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return [" ".join(shlex.split(line, comments=True)) for line in block[1].splitlines()]


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def test_commands_and_contributing_make_the_environment_that_they_use() -> None:
    assert commands() == [f"{MAKE} && .venv/bin/nox -s {session}" for session in ("demo", "tests")]
    first, activate, *_ = re.findall(r"^    (\S.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert first == MAKE
    assert activate.startswith(". .venv/bin/activate")


def test_ci_installs_the_locked_environment_before_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    make, _, run = commands()[1].rpartition(" && ")
    locked = f"{make} -c requirements/nox.txt"
    assert script.index(f"\n({locked}) ") < script.index(f"\n{run} ") < script.index("\n.venv/bin/nox -R -s full ")
    assert 'beside_the_tests "$check" &' in script


@pytest.mark.parametrize("fails", [
    "nothing", "-s tests", "-R -s full", "-s types", "-s frameworks --install-only", "-R -s frameworks",
])  # fmt: skip
def test_ci_runs_every_check_and_fails_with_each_of_them(tmp_path: Path, fails: str) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    nox = f'#!/bin/sh\necho "runs: $*"\necho "= 5 passed in 3s ="\ncase "$*" in "{fails}"*) exit 1;; esac\n'
    python = "#!/bin/sh\nmkdir -p .venv/bin && cp bin/nox bin/python .venv/bin\n"
    (tmp_path / "bin").mkdir()
    for name, code in {"nox": nox, "python": "#!/bin/sh\n", "python3": python}.items():
        (tmp_path / "bin" / name).write_text(code)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == (0 if fails in ("nothing", "-s frameworks --install-only") else 1), run.stderr
    frameworks = "-R -s frameworks -- -k checkpoints"
    if fails == "-s frameworks --install-only":  # a failure of other projects is no fault
        frameworks = fails
    wanted = {"-s tests", "-R -s full", "-s lint", "-s types", "-s imports", "-s docs", frameworks}
    assert set(re.findall("runs: (.*)", run.stdout)) == wanted
    assert run.stdout.splitlines()[-1] == "= 5 passed in 3s ="


def test_sessions_that_are_named_anywhere_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", ".ci/run", "benchmarks/README.md"):
        for names in re.findall(r"nox -s ((?:[a-z_]+ ?)+)", (ROOT / page).read_text()):
            named = {name for name in names.split() if name in sessions()}
            assert names.split()[0] in named, f"{page}: nox -s {names}"


def test_no_page_has_pip_install_outside_of_an_environment() -> None:
    """The system's own `python3` refuses that on Debian, Ubuntu and others (PEP 668)."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", *(ROOT / "docs").rglob("*.md")]
    assert not [
        page for page in pages if re.search(r"python3 -m pip|^\s*pip3? install", page.read_text(), re.MULTILINE)
    ]


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


def test_files_and_names_on_the_pages_exist() -> None:
    maps = (ROOT / "docs/explanation/architecture.md").read_text() + (SOURCES / "README.md").read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|md)|[\w]+/\w+)`", maps))
    assert {name for name in named if not (ROOT / name).exists() and not (SOURCES / name).exists()} == set()
    assert [name for name in NAMES if not exists(name)] == []


def test_page_has_a_row_for_each_contract_and_each_way_to_register() -> None:
    testing, public = importlib.import_module("headrace.testing"), importlib.import_module("headrace")
    contracts = {f"headrace.testing.{name}" for name in testing.__all__ if name.endswith("Contract")}
    ways = {f"hr.{name}" for name in public.__all__ if name.startswith("register_")}
    assert contracts | ways <= set(NAMES)


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


EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "train_digits.py": r"accuracy on scans that were not trained on: 0\.9[4-9]",
    "stream_http.py": r"epoch 0: 1399 scans",
    "own_dataset.py": r"over HTTP: 200 scans[\s\S]*from files: 200 scans",
    "coco.py": r"epoch 1: 60 photographs, (\d+) of \1 boxes",
    "pretrain_packed.py": r"12 steps: loss 7\.\d+ to [567]\.\d+; \d\.\d% padding; prose 0\.[67]\d?, code 0\.[234]",
    "finetune_chat.py": r"12 steps: loss 7\.\d+ to [3456]\.\d+; \d\d?% padding",
    "image_text_pairs.py": r"epoch 1: 43 batches, (100|\d\d)% of the last named right",
    "video_clips.py": r"the last epoch: 120 clips of 20 stretches, (100|[5-9]\d)% .* right",
    "async_trainer.py": r"dashboard: [\s\S]*22 steps, the last loss \d",
}


def test_every_example_is_run() -> None:
    assert set(SHOWS) == {path.name for path in EXAMPLES.glob("*.py")} - {"digits.py"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHOWS)
def test_example_prints_its_results(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--quick"],
        capture_output=True, text=True, timeout=290, cwd=tmp_path, env=os.environ | {"PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS[name], done.stdout), done.stdout + done.stderr
    assert not re.search(r"Traceback|headrace.*Warning", done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []
