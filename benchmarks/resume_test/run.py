"""The resume test on every library that is installed here; prints Markdown tables.

    python benchmarks/resume_test/run.py [CONTESTANT ...]

Libraries whose requirements exclude one another take turns, in environments of their own, with one `--json FILE`: it
keeps what was found, and the tables show all of it. `--svg FOLDER` draws the first table, light and dark.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import readme_pictures as pictures
import tables
from resume_test.contestants import ALL, HEADRACE, PACKED
from resume_test.course import SCENARIOS, Course, Failure
from resume_test.phase import size_of

OF_TOKENS = {*PACKED, "grain_packed"}  # a table of their own: what is counted are tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="*", metavar="CONTESTANT", help=f"of {', '.join(ALL)}; all")
    parser.add_argument("--json", type=Path, help="keeps what was found; the tables show all of it")
    parser.add_argument(
        "--svg", type=Path, metavar="FOLDER", help="draws the verdicts: resume_light.svg, resume_dark.svg"
    )
    parser.add_argument("--large", type=int, default=200_000, help="samples where time is taken; 0: take no time")
    parser.add_argument("--runs", type=int, default=3, help="the medians are shown")
    options = parser.parse_args()
    if unknown := set(options.contestants) - set(ALL):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    rows: dict[str, tables.Row] = {}
    if options.json and options.json.exists():
        rows = {row["contestant"]: row for row in tables.read(options.json)}
    for name in options.contestants or ALL:
        if missing := ALL[name].missing:
            if name not in rows:
                print(f"{ALL[name].label}: not installed: {', '.join(missing)}", file=sys.stderr)
            continue
        rows[name] = rows.get(name, {}) | row_of(name, options.large, options.runs)
        tables.append(options.json, rows[name])
    shown = [rows[name] for name in ALL if name in rows]
    samples, tokens = ([row for row in shown if (row["contestant"] in OF_TOKENS) == of] for of in (False, True))
    print("\n".join(verdicts(rows) for rows in (samples, tokens) if rows))
    if options.svg:
        draw(samples, options.svg)
    if any("first" in row for row in shown):
        print("\n" + costs(shown))
    return 0


def row_of(name: str, large: int, runs: int) -> tables.Row:
    row: tables.Row = {"contestant": name, "version": ALL[name].version}
    try:
        with tempfile.TemporaryDirectory() as folder:
            course = Course(name, Path(folder))
            course.write()
            row["verdicts"] = {scenario: _told(course, scenario) for scenario in SCENARIOS}
            row["state_bytes"] = course.state_bytes()
        if large:
            with tempfile.TemporaryDirectory() as folder:
                course = Course(name, Path(folder), large)
                course.write()
                found = course.first_batch(batches=large * 9 // 10 // 64, runs=runs)
            row |= {"first": found, "large": large, "large_state_bytes": size_of(found.pop("state"))}
    except Failure as failure:
        row["failure"] = str(failure)
    return row


def _told(course: Course, scenario: str) -> str:
    verdict = course.verdict(scenario)
    text = f"{ALL[course.contestant].label}: {SCENARIOS[scenario].told}: {verdict}\n{verdict.message}"
    print(text.strip(), file=sys.stderr)
    return str(verdict)


def verdicts(rows: list[tables.Row]) -> str:
    table = []
    for row in rows:
        found = row.get("verdicts", {})
        table.append([_name(row), *(found.get(scenario, row.get("failure", "")) for scenario in SCENARIOS)])
    return tables.markdown(["", *(scenario.told for scenario in SCENARIOS.values())], table)


def draw(rows: list[tables.Row], folder: Path) -> None:
    for theme in (pictures.LIGHT, pictures.DARK):
        grid = pictures.resume_grid(pictures.cells(verdicts(rows)), theme)
        (folder / f"resume_{theme.name}.svg").write_text(grid)


def costs(rows: list[tables.Row]) -> str:
    head = ["state, bytes", "of the large data set", "first batch, s", "resumed, s", "CPU, s", "resumed, CPU s"]
    table = []
    for row in rows:
        if "first" not in row:
            continue
        fresh, resumed = row["first"]["fresh"], row["first"]["resumed"]
        pairs = [f"{side[name]:.2f}" for name in ("wall_s", "cpu_s") for side in (fresh, resumed)]
        reads = [f"{side['reads']:,}" for side in (fresh, resumed)]
        table.append([_name(row), f"{row['state_bytes']:,}", f"{row['large_state_bytes']:,}", *pairs, *reads])
    return tables.markdown(["", *head, "samples read", "resumed, samples read"], table)


def _name(row: tables.Row) -> str:
    """The label, with the version of a library that is not this one."""
    label, version = ALL[row["contestant"]].label, row["version"]
    return label if row["contestant"] in HEADRACE | PACKED else f"{label} ({version})"


if __name__ == "__main__":
    sys.exit(main())
