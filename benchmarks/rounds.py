"""What the benchmarks' scripts share: the command line, the rounds of fresh processes, and groups of their rows.

A job is a dictionary of what distinguishes it from others. In each round all jobs take their turn, each in a fresh
process, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh
import tables
from fresh import Row
from server import Server

_NOT_TOLD = ("cpu_s", "server_cpu_s")


def parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with the options that all benchmarks have."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--runs", type=int, default=5)
    found.add_argument("--json", type=Path, help="add a JSON line for each run to this file")
    found.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: the table of the runs in FILE")
    found.add_argument("--child", help=argparse.SUPPRESS)
    return found


def parse(
    line: argparse.ArgumentParser, child: Callable[[Row], Iterator[Row]], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options; in a fresh process that `rows_of` has started: `child` does its job, and the process ends."""
    options = line.parse_args(arguments)
    if options.child:
        fresh.answer(child, options.child)
        raise SystemExit
    return options


def rows_of(
    script: str, jobs: list[Row], options: argparse.Namespace, server: Server, limit_s: float = 120.0
) -> list[Row]:
    """A row for each job and round, measured now, or out of the file of an earlier run.

    The machine is held for one round at a time. A job whose result is that it was `refused` is left out.
    """
    if options.report:
        return tables.read(options.report)
    rows: list[Row] = []
    refused: list[Row] = []
    session = time.strftime("%FT%T")
    with server:
        for number in range(options.runs):
            with fresh.machine():
                for job in [job for job in jobs if job not in refused]:
                    row = fresh.measure(script, job | {"session": session, "round": number}, server, limit_s)
                    words = " ".join(str(value) for value in job.values())
                    if "refused" in row:
                        refused.append(job)
                        print(f"{words} is left out: {row['refused']}", flush=True)
                        continue
                    rows.append(row)
                    tables.append(options.json, row)
                    print(f"{number:2} {words}: {_outcome(row, job)}", flush=True)
    return rows


def group(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by their values of `names`, in the order in which these came first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def round_of(row: Row) -> tuple[Any, ...]:
    """What all rows of one round have in common."""
    return row["session"], row["round"]


def ratios(mine: list[Row], others: list[Row], name: str) -> list[float]:
    """My value of `name` for each round in which the others have one, as a part of theirs; of their largest."""
    theirs: dict[tuple[Any, ...], float] = {}
    for row in others:
        if row.get(name):
            theirs[round_of(row)] = max(row[name], theirs.get(round_of(row), 0.0))
    return [row[name] / theirs[round_of(row)] for row in mine if name in row and round_of(row) in theirs]


def counted(mine: list[Row]) -> str:
    """How many of the runs succeeded, or what became of the last one."""
    good = [row for row in mine if "error" not in row]
    return f"{len(good)} of {len(mine)}" if good else f"failed: {tables.last_line(mine[-1]['error'])}"


def _outcome(row: Row, job: Row) -> str:
    if "error" in row:
        return f"FAILED {row['error'][-500:]}"
    untold = {*_NOT_TOLD, *job}
    numbers = {name: value for name, value in row.items() if isinstance(value, float) and name not in untold}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
