"""Draw the README's pictures, light and dark, into docs/images: `readme_pictures.py`.

The numbers are those of the tables in docs/explanation, so page and picture agree.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
FONT = "font-family=\"-apple-system,'Segoe UI','Noto Sans','Liberation Sans',Helvetica,Arial,sans-serif\""
VERDICTS = {  # kind: what the legend says
    "exact": "exact",
    "order": "no sample lost, other order",
    "raises": "raises an error",
    "loses": "loses or repeats samples",
    "none": "no state",
}


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of one variant."""

    name: str
    text: str
    faint: str  # secondary text, lines
    bar: str  # headrace's
    other: str  # everybody else's
    box: str
    process: str
    verdicts: dict[str, tuple[str, str]]  # kind: (fill, text)


LIGHT = Theme(
    name="light",
    text="#1f2328",
    faint="#656d76",
    bar="#0969da",
    other="#b6bfc9",
    box="#ddf4ff",
    process="#f0f3f6",
    verdicts={
        "exact": ("#aceebb", "#044f1e"),
        "order": ("#b6e3ff", "#0a3069"),
        "raises": ("#fae17d", "#4d2d00"),
        "loses": ("#ffaba8", "#660018"),
        "none": ("#e6eaef", "#57606a"),
    },
)
DARK = Theme(
    name="dark",
    text="#f0f6fc",
    faint="#9198a1",
    bar="#4493f8",
    other="#59636e",
    box="#0c2d6b",
    process="#1c2129",
    verdicts={
        "exact": ("#0f5323", "#aff5b4"),
        "order": ("#0c2d6b", "#a5d6ff"),
        "raises": ("#5a3e00", "#f8e3a1"),
        "loses": ("#78191b", "#ffdcd7"),
        "none": ("#2a313c", "#9198a1"),
    },
)


def main() -> None:
    """Draw all of them."""
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture)


def pictures() -> dict[str, str]:
    """Each picture by its file name."""
    resume, speed = (table(DOCS / "explanation" / page) for page in ("resume_compared.md", "measured.md"))
    drawn = {}
    for theme in (LIGHT, DARK):
        drawn[f"flow_{theme.name}.svg"] = flow(theme)
        drawn[f"resume_{theme.name}.svg"] = resume_grid(resume, theme)
        drawn[f"speed_{theme.name}.svg"] = speed_bars(speed, theme)
    return drawn


def table(page: Path) -> list[list[str]]:
    """The cells of the page's first table with three columns or more, without the line below its head."""
    found = re.search(r"^(?:\|(?:[^|\n]*\|){3,}\n)+", page.read_text(), re.MULTILINE)
    assert found is not None, f"{page} has no table"
    return cells(found[0])


def cells(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table, without the line below its head."""
    lines = [line.strip().strip("|") for line in markdown.strip().splitlines()]
    return [[cell.strip() for cell in line.split("|")] for line in lines if not set(line) <= set("|-: ")]


def verdict_kind(text: str) -> str:
    """What colour a cell of the resume test has."""
    if text == "exact":
        return "exact"
    if text == "no state":
        return "none"
    if " lost" in text and re.match(r"\d", text):
        return "loses"
    return "order" if "order" in text else "raises"


def resume_grid(rows: list[list[str]], theme: Theme) -> str:
    """The verdicts of the resume test: a row for each library, a column for each scenario."""
    left, width, height, top, gap = 206, 71, 34, 58, 3
    head, *body = rows
    parts = []
    for column, scenario in enumerate(head[1:]):
        middle = left + column * width + width / 2
        lines = textwrap.wrap(scenario.partition(", global")[0].replace(" → ", "→"), 12)
        for number, line in enumerate(lines):
            parts.append(_text(middle, top - 8 - 14 * (len(lines) - 1 - number), line, theme.text, 11, "middle"))
    for number, (library, *verdicts) in enumerate(body):
        y = top + number * height
        name, _, version = library.partition(" (")
        bold = ' font-weight="600"' if name.startswith("headrace") else ""
        parts.append(_text(0, y + (14 if version else 20), name, theme.text, 12, more=bold))
        if version:
            parts.append(_text(0, y + 27, version.rstrip(")"), theme.faint, 10))
        for column, verdict in enumerate(verdicts):
            fill, colour = theme.verdicts[verdict_kind(verdict)]
            x = left + column * width
            parts.append(_box(x, y, width - gap, height - gap, fill))
            lines = _short(verdict)
            for line_number, line in enumerate(lines):
                down = y + (height - gap) / 2 + 4 + 12 * line_number - 6 * (len(lines) - 1)
                parts.append(_text(x + (width - gap) / 2, down, line, colour, 10.5, "middle"))
    y, x = top + len(body) * height + 10, 0.0
    for kind, meaning in VERDICTS.items():
        parts += [_box(x, y, 14, 14, theme.verdicts[kind][0]), _text(x + 20, y + 11, meaning, theme.text, 11)]
        x += 44 + 6.2 * len(meaning)
    title = "What a resumed run delivers, compared with the uninterrupted run"
    return _svg(left + width * (len(head) - 1), y + 22, title, parts)


def _short(verdict: str) -> list[str]:
    """A cell in one or two lines; the error's name stays on the page."""
    if verdict_kind(verdict) == "raises":
        return ["raises"]
    return [line.replace("other order in batches", "other order") for line in verdict.split(", ")]


def speed_bars(rows: list[list[str]], theme: Theme) -> str:
    """Samples/s of each loader as a share of the machine's limit, which is the last column."""
    left, width, bar, top = 130, 520, 16, 4
    loaders = rows[0][1:]
    parts: list[str] = []
    y = top
    for name, *values in rows[1:]:
        found = [_number(value) for value in values]
        limit = found[-1]
        if "samples/s" not in name or limit is None or found[1] is None:
            continue
        parts.append(_text(0, y + 14, name.replace(": s", ", s"), theme.text, 12, more=' font-weight="600"'))
        y += 22
        begin = y
        for loader, rate in zip(loaders[:-1], found[:-1], strict=True):
            if rate is None:
                continue
            fill = theme.bar if loader == "headrace" else theme.other
            parts.append(_text(left - 8, y + 12, re.sub(r" [\d.]+$", "", loader), theme.text, 11, "end"))
            parts.append(_box(left, y, max(2, width * rate / limit), bar - 2, fill))
            label = f"{rate:,} ({100 * rate / limit:.0f} %)"
            parts.append(_text(left + width * rate / limit + 6, y + 12, label, theme.faint, 11))
            y += bar
        line = f'd="M{left + width} {begin - 3}V{y}" stroke="{theme.faint}" stroke-dasharray="3 3"'
        parts.append(f"<path {line}/>")
        parts.append(_text(left + width + 6, y - 4, f"limit: {limit:,}", theme.faint, 11))
        y += 12
    return _svg(790, y, "Samples per second, as a share of the machine's limit", parts)


def _number(cell: str) -> int | None:
    found = re.search(r"\d[\d,]*", cell)
    return int(found[0].replace(",", "")) if found else None


def flow(theme: Theme) -> str:
    """How data passes from storage to the training loop."""
    stages = [  # name, what it does, where it runs
        ("plan", "which samples,", "in which order", "arithmetic"),
        ("fetch", "bytes, many", "requests at once", "event loop"),
        ("work", "decode, map,", "collate", "worker processes"),
        ("deliver", "batches", "in plan order", "your process"),
    ]
    width, gap, top, height = 128, 34, 62, 86
    parts = []
    for number, (name, first, second, where) in enumerate(stages):
        x = number * (width + gap)
        parts.append(_box(x, top, width, height, theme.box, 8))
        parts.append(_text(x + width / 2, top + 26, name, theme.text, 16, "middle", ' font-weight="600"'))
        for line, text in enumerate((first, second)):
            parts.append(_text(x + width / 2, top + 50 + 17 * line, text, theme.text, 12.5, "middle"))
        parts.append(_text(x + width / 2, top + height + 20, where, theme.faint, 12, "middle"))
        parts.append(_arrow(x + width + 4, top + height / 2, gap - 8, 0, theme))
    x = len(stages) * (width + gap)
    parts.append(_box(x, top, 150, height, theme.process, 8))
    for line, text in enumerate(("for batch in loader", "async for batch", "in loader")):
        parts.append(_text(x + 75, top + 30 + 18 * line + 4 * (line > 0), text, theme.text, 12.5, "middle"))
    middle = width + gap + width / 2
    parts.append(_text(middle, 18, "S3 · HTTP · GCS · Azure · Hugging Face · disk", theme.text, 13, "middle"))
    parts.append(_arrow(middle, 26, 0, 30, theme))
    return _svg(x + 150, top + height + 32, "Data flow: plan, fetch, work, deliver, your training loop", parts)


def _arrow(x: float, y: float, right: float, down: float, theme: Theme) -> str:
    tip_x, tip_y = x + right, y + down
    head = f"M{tip_x - 7} {tip_y - 5}l7 5l-7 5" if right else f"M{tip_x - 5} {tip_y - 7}l5 7l5 -7"
    line = f"M{x} {y}L{tip_x} {tip_y}{head}"
    return f'<path d="{line}" fill="none" stroke="{theme.faint}" stroke-width="2"/>'


def _box(x: float, y: float, width: float, height: float, fill: str, radius: float = 3) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, fill: str, size: float, anchor: str = "start", more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {place}{more}>{escape(text)}</text>"


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


if __name__ == "__main__":
    main()
