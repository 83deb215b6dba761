"""The table of docs/reference/formats.md: `python tests/full/matrix/page.py` writes it again."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from full.matrix.kinds import ABILITIES, KINDS, PACKINGS, Kind

PAGE = Path(__file__).parents[3] / "docs/reference/formats.md"
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


def table() -> str:
    """A row for each format and way of packing, and the reasons below."""
    notes: dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    def row(kind: Kind, packing: str) -> str:
        if packing not in kind.packings:
            return f"| {kind.name} | {packing} |" + f" – {note(kind.absent)} |" * len(ABILITIES)
        reasons = [kind.cannot.get((packing, ability)) for ability in ABILITIES]
        cells = ["yes" if reason is None else f"no {note(reason.text)}" for reason in reasons]
        return f"| {kind.name} | {packing} | {' | '.join(cells)} |"

    lines = [f"| format | packed | {' | '.join(ABILITIES)} |", "|" + "---|" * (len(ABILITIES) + 2)]
    lines += [row(kind, packing) for kind in KINDS for packing in PACKINGS if packing in kind.packings or kind.absent]
    return "\n".join([*lines, "", *(f"{number}. {text}." for text, number in notes.items()), ""])


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
