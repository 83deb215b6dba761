"""Docstrings describe each parameter by its own name, as the reference is made from them; their examples run."""

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from meta.test_docs import BLOCK, PAGES

import headrace as hr
from headrace.dataset.operators import Operators
from headrace.formats import decoders
from headrace.formats import registry as formats_registry
from headrace.ops import registry as ops_registry

SOURCES = Path(__file__).parents[2] / "src"
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
        f"{path.relative_to(SOURCES)}: {whose}: {name}"
        for path in sorted(SOURCES.rglob("*.py"))
        for whose, name, known in described(ast.parse(path.read_text()))
        if name not in known
    ]
    assert not wrong


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in sorted(SOURCES.rglob("*.py")):
        if ">>> " in path.read_text():
            name = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
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
