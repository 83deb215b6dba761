"""The shape of the package: bounds that were reached, and that nothing may raise again."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
LINES_OF_A_FILE = 800
PARAMETERS = 9  # but for torch's constructor
MOST = {"isinstance": 386, "Any": 632}  # may only fall


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
    """What runs when a module is imported: neither the bodies of functions nor what is for types alone."""
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
    # what is left lies in circles, or above some
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


@pytest.mark.parametrize("word", MOST)
def test_types_are_asked_for_and_left_open_no_more_often_than_before(word: str, modules: dict[str, ast.Module]) -> None:
    count = sum(
        isinstance(node, ast.Name) and node.id == word for module in modules.values() for node in ast.walk(module)
    )
    assert count <= MOST[word]
