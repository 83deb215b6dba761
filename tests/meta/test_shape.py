"""The shape of the package: bounds that were reached, and that nothing may raise again."""

from __future__ import annotations

import ast
import collections
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
LINES_OF_A_FILE = 800
LINES_OF_A_MODULE_OF_ITS_OWN = 60
PARAMETERS = 9  # except torch's constructor
MOST = {"isinstance": 357, "Any": 552}  # may only fall
MOST_REFUSALS = 60  # may only fall
MOST_LINES = {"src": 64_683, "tests": 56_969}  # may only fall
MOST_WORDS = {"src": 1, "tests": 20}  # may only fall
FIRST_WORDS = re.compile(r"\A(What|Whether|Of|The same)\b")
WORDS = re.compile(
    r"\b(told|tells?|said|says?|lies?|behind|left out|leaves? out|go on|goes on|gone on|comes? again|came again|begun"
    r"|taken in|lets? go|whoever|besides|anew|of which|of torch's)\b",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCES).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in sorted(SOURCES.rglob("*.py"))
    }


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    return {path.relative_to(SOURCES).as_posix(): len(path.read_text().splitlines()) for path in SOURCES.rglob("*.py")}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not is_for_types:
            yield child
            yield from statements(child)


def imports_of(nodes: Iterable[ast.AST], names: set[str]) -> Iterator[str]:
    """The modules among `names` that import statements among `nodes` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from {full if full in names else node.module} & names


def test_no_module_imports_itself_by_way_of_others(modules: dict[str, ast.Module]) -> None:
    names = set(modules)
    graph = {name: set(imports_of(statements(module), names)) - {name} for name, module in modules.items()}
    left = dict(graph)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    # the rest is in cycles, or imports modules of cycles
    while top := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in top:
            del left[name]
    assert sorted(left) == []


def test_no_file_is_longer_than_one_can_keep_in_mind(lines: dict[str, int]) -> None:
    assert {name: count for name, count in lines.items() if count > LINES_OF_A_FILE} == {}


def test_no_function_has_more_parameters_than_one_can_keep_apart(modules: dict[str, ast.Module]) -> None:
    found = {}
    for name, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(arg.arg not in ("self", "cls") for arg in args)
                count += (node.args.vararg is not None) + (node.args.kwarg is not None)
                if count > PARAMETERS and (name, node.name) != ("headrace.loader", "__init__"):
                    found[f"{name}.{node.name}"] = count
    assert found == {}


def test_no_two_classes_have_one_name(modules: dict[str, ast.Module]) -> None:
    homes = collections.defaultdict(list)
    for name, module in modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_a_short_module_with_one_importer_in_its_package_is_part_of_it(
    modules: dict[str, ast.Module], lines: dict[str, int]
) -> None:
    names = set(modules)
    importers = collections.defaultdict(set)
    for name, module in modules.items():
        for imported in imports_of(ast.walk(module), names - {name}):
            importers[imported].add(name)
    short = {
        name
        for name, (first, *more) in importers.items()
        if not more and first.rpartition(".")[0] == name.rpartition(".")[0]
        if lines.get(f"{name.replace('.', '/')}.py", LINES_OF_A_FILE) < LINES_OF_A_MODULE_OF_ITS_OWN
    }
    assert short == set()


@pytest.mark.parametrize("folder", MOST_LINES)
def test_the_tree_does_not_grow(folder: str) -> None:
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")) <= MOST_LINES[folder]


def unclear_words(path: Path) -> Iterator[str]:
    """The words that plain English has better ones for, in docstrings, texts and comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield from FIRST_WORDS.findall(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from WORDS.findall(node.value)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield from WORDS.findall(token.string)


@pytest.mark.parametrize("folder", MOST_WORDS)
def test_english_does_not_get_less_plain(folder: str) -> None:
    assert sum(1 for path in (ROOT / folder).rglob("*.py") for _ in unclear_words(path)) <= MOST_WORDS[folder]


@pytest.mark.parametrize("word", MOST)
def test_types_are_asked_for_and_left_open_no_more_often_than_before(word: str, modules: dict[str, ast.Module]) -> None:
    count = sum(
        isinstance(node, ast.Name) and node.id == word for module in modules.values() for node in ast.walk(module)
    )
    assert count <= MOST[word]


def test_refusals_come_from_checks_and_tables(modules: dict[str, ast.Module]) -> None:
    """Errors of options are made by `headrace._util.check`; the others are written by hand."""
    raised = [node.exc for module in modules.values() for node in ast.walk(module) if isinstance(node, ast.Raise)]
    by_hand = [one for one in raised if isinstance(one, ast.Call) and ast.unparse(one.func) == "OptionError"]
    assert len(by_hand) <= MOST_REFUSALS
