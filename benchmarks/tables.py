"""Rows of results to Markdown and to JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]


def spread(values: Iterable[float | None], digits: int = 0) -> str:
    """`median (smallest-largest)`, or a dash where there is no value."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{median(known):.{digits}f} ({min(known):.{digits}f}-{max(known):.{digits}f})"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; short rows end in empty cells."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join([*cells, *[""] * (len(columns) - len(cells))]) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


def append(path: Path | None, row: Row) -> None:
    """Add a row to a file of JSON lines, where one is wanted."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_line(text: str, width: int = 100) -> str:
    """The end of an error's text, short enough for a table."""
    return (text.strip().splitlines() or [""])[-1][:width].replace("|", "/")
