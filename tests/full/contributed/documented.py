"""Extensions as users write them: those of the pages docs/how_to/own_*.md."""

import ast
import re
from pathlib import Path

PAGES = Path(__file__).parents[3] / "docs/how_to"
DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


def is_definition(node: ast.stmt) -> bool:
    return isinstance(node, DEFINITIONS) or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))


def define(page: str) -> None:
    """Define here what the Python blocks of a page define. Statements of other kinds are not run."""
    for block in re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL):
        module = ast.parse(block)
        module.body = list(filter(is_definition, module.body))
        exec(compile(module, page, "exec"), globals())


for _page in ("own_decoder", "own_executor", "own_format", "own_operator"):
    define(_page)
