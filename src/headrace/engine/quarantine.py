"""Files that list skipped samples, one line of JSON each."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from headrace._util.context import divided
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.scheduler.skip_rules import SkipMeters
from headrace.errors import OptionError, printable
from headrace.options import open_file
from headrace.types import Ints

_TEXT_MOST = 500  # characters of a name or error, so that one write takes a line

log = logging.getLogger("headrace")


class Quarantine:
    """Logs each skipped sample to a file, and forwards it to the meters.

    Several processes may write to one file: each line is appended by one write.
    """

    def __init__(self, path: str, plan: EpochPlan, meters: SkipMeters) -> None:
        self._path, self._plan, self._meters = path, plan, meters

    def count_skip(self, epoch: int, position: int, name: str, error: str) -> None:
        self._meters.count_skip(epoch, position, name, error)
        plan = self._plan
        line: dict[str, object] = {"data": plan.facts.data, "epoch": epoch}
        if plan.order is not None:
            line["number"] = int(plan.numbers(plan.order, np.array([divided(position)[0]]))[0])
        line |= {"name": name[:_TEXT_MOST], "error": error[:_TEXT_MOST]}
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as why:
            path = printable(self._path)
            log.error("hr.Skip(log=%r) cannot be written, and lacks a sample of epoch %d: %s", path, epoch, why)

    def _append(self, line: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def numbers_in(paths: Iterable[str | os.PathLike[str]], data: str) -> Ints:
    """Read the numbers of the listed samples, in any order.

    Raises:
        OptionError: a file cannot be read, or its samples have no numbers or belong to other data.
    """
    numbers: list[int] = []
    for path in map(Path, paths):
        try:
            with open(path, opener=open_file) as file:  # pathlib takes no opener
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"exclude={str(path)!r} cannot be read: {error}") from error
        for row, line in enumerate(lines, 1):
            numbers.append(_number(line, data, f"exclude={str(path)!r}, line {row}"))
    return np.array(numbers, np.int64)


def _number(line: str, data: str, where: str) -> int:
    try:
        found = json.loads(line)
        of_data, number = found["data"], found.get("number")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"{where}: this is no line that hr.Skip(log=) has written: {line!r:.100}") from error
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise OptionError(
            f"{where}: that sample has no number, as it was counted while it was read: only samples with numbers, "
            "such as those of shards with an index, can be excluded"
        )
    if of_data != data:
        raise OptionError(
            f"{where}: it is of other data ({of_data}; here they are {data}), where other samples have these numbers"
        )
    return number
