"""torch's DataLoader and ours in its place, on torch's data sets: what the benchmarks of the drop-in share.

    torch       torch.utils.data.DataLoader
    headrace    headrace.DataLoader, with nothing else changed
    economic    headrace.DataLoader(economic=True): all workers make the samples of one batch

A job is a dictionary with the loader's name under "loader".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import rounds
import tables
import torch.utils.data
from fresh import Row
from local_samples import Numbers
from server import NoServer
from torch.utils.data import Dataset

import headrace as hr

LOADERS = ("torch", "headrace", "economic")

_warm: list[Iterator[Any]] = []


class RefusedError(Exception):
    """This loader's constructor does not take these arguments (yet)."""


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
    """Have headrace's fork server ready, as it is in a trainer whose second loader starts; torch has none."""
    if name != "torch":
        _warm.append(iter(make(name, Numbers(4), num_workers=1)))
        next(_warm[-1])


def parser(about: str | None, loaders: Iterable[str] = LOADERS) -> argparse.ArgumentParser:
    """A command line with the options that all of these benchmarks have."""
    found = rounds.parser(about)
    found.add_argument("--loader", nargs="+", choices=loaders, default=list(loaders))
    return found


def parse(line: argparse.ArgumentParser, child: Callable[[Row], Iterator[Row]]) -> argparse.Namespace:
    """As `rounds.parse`; a refusal is a result, too."""
    torch.set_num_threads(1)
    return rounds.parse(line, lambda job: _or_refusal(child, job))


def rows_of(script: str, jobs: list[Row], options: argparse.Namespace, limit_s: float = 180.0) -> list[Row]:
    """As `rounds.rows_of`, without a server."""
    return rounds.rows_of(script, jobs, options, NoServer(), limit_s)


def _or_refusal(child: Callable[[Row], Iterator[Row]], job: Row) -> Iterator[Row]:
    try:
        yield from child(job)
    except RefusedError as refusal:
        for _ in range(2):  # whether or not the clock runs: what is given before it does is not looked at
            yield {"refused": tables.last_line(str(refusal))}
