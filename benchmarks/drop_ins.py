"""torch's DataLoader and ours in its place, on torch's data sets: what the benchmarks of the drop-in share.

    torch       torch.utils.data.DataLoader
    headrace    headrace.DataLoader, with nothing else changed
    economic    headrace.DataLoader(economic=True): all workers make the samples of one batch

A job is a dictionary with the loader's name under "loader". Each is run in a fresh process; in each round all loaders
take their turn, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fresh
import tables
import torch.utils.data
from fresh import Row
from local_samples import Numbers
from server import Server
from torch.utils.data import Dataset

import headrace as hr

LOADERS = ("torch", "headrace", "economic")

_NOT_TOLD = ("cpu_s", "server_cpu_s", "foreign_cores")
_warm: list[Iterator[Any]] = []


class RefusedError(Exception):
    """This loader's constructor does not take these arguments (yet)."""


class NoServer(Server):
    """In the place of the object store, for benchmarks that read nothing."""

    def __init__(self) -> None:
        super().__init__(Path())

    def stats(self) -> dict[str, Any]:
        return {"pid": 0} | dict.fromkeys(("requests", "asked_bytes", "sent_bytes", "peak_in_flight"), 0)

    def reset(self) -> None:
        pass


def make(name: str, dataset: Dataset[Any], **options: Any) -> Any:
    """The loader `name` of a data set.

    Raises:
        RefusedError: its constructor does not take the arguments.
    """
    if name == "torch":
        return torch.utils.data.DataLoader(dataset, **options)
    if name == "economic":
        options["economic"] = True
    try:
        return hr.DataLoader(dataset, **options)
    except (TypeError, ValueError) as error:
        raise RefusedError(str(error)) from error


def warm_up(name: str) -> None:
    """Have headrace's helper process ready, as it is in a trainer whose second loader starts; torch has none."""
    if name != "torch":
        _warm.append(iter(make(name, Numbers(4), num_workers=1)))
        next(_warm[-1])


def parser(about: str | None, loaders: Iterable[str] = LOADERS) -> argparse.ArgumentParser:
    """A command line with the options that all of these benchmarks have."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--loader", nargs="+", choices=loaders, default=list(loaders))
    found.add_argument("--runs", type=int, default=5)
    found.add_argument("--json", type=Path, help="add a JSON line for each run to this file")
    found.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: the table of the runs in FILE")
    found.add_argument("--child", help=argparse.SUPPRESS)
    return found


def rows_of(script: str, jobs: list[Row], options: argparse.Namespace, limit_s: float = 180.0) -> list[Row]:
    """A row for each job and round, measured now, or out of the file of an earlier run."""
    if options.report:
        return tables.read(options.report)
    rows: list[Row] = []
    session = time.strftime("%FT%T")
    left_out: set[str] = set()
    for number in range(options.runs):
        with fresh.machine():
            for job in jobs:
                if job["loader"] in left_out:
                    continue
                row = fresh.measure(script, job | {"session": session, "round": number}, NoServer(), limit_s)
                if "refused" in row:
                    left_out.add(job["loader"])
                    print(f"{job['loader']} is left out: {row['refused']}", flush=True)
                    continue
                rows.append(row)
                tables.append(options.json, row)
                print(f"{number:2} {_words(job)}: {_outcome(row)}", flush=True)
    return rows


def answer(child: Callable[[Row], Iterator[Row]], job: str) -> None:
    """The fresh process's side, as `fresh.answer`; a refusal is a result, too."""
    torch.set_num_threads(1)
    fresh.answer(lambda row: _or_refusal(child, row), job)


def _or_refusal(child: Callable[[Row], Iterator[Row]], job: Row) -> Iterator[Row]:
    try:
        yield from child(job)
    except RefusedError as refusal:
        for _ in range(2):  # whether or not the clock runs: what is given before it does is not looked at
            yield {"refused": tables.last_line(str(refusal))}


def group(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by their values of `names`, in the order in which these came first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def ratios(mine: list[Row], others: list[Row], name: str) -> list[float]:
    """My value of `name` for each round in which the others have one, as a part of theirs."""
    theirs = {(row["session"], row["round"]): row[name] for row in others if row.get(name)}
    rounds = [(row, (row["session"], row["round"])) for row in mine if name in row]
    return [row[name] / theirs[key] for row, key in rounds if key in theirs]


def counted(mine: list[Row]) -> str:
    """How many of the runs succeeded, or what became of the last one."""
    good = [row for row in mine if "error" not in row]
    return f"{len(good)} of {len(mine)}" if good else f"failed: {tables.last_line(mine[-1]['error'])}"


def _words(job: Row) -> str:
    return " ".join(str(value) for value in job.values())


def _outcome(row: Row) -> str:
    if "error" in row:
        return f"FAILED {row['error'][-500:]}"
    numbers = {name: value for name, value in row.items() if isinstance(value, float) and name not in _NOT_TOLD}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
