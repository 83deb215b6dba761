"""CPU time that a sample's random numbers cost a worker: `randomness.py --runs 7`.

    seeded          Python's, numpy's and torch's generators are seeded, and hr.rng() is the sample's own
    random=False    hr.rng() alone is the sample's own
    rng             the same, and a number is drawn from hr.rng()
    by hand         random=False, and the function calls random.seed, np.random.seed and torch.manual_seed

Each is the time of a worker for one sample, less that of a step that sets nothing in the same run. One process, all
ways in turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tables
import torch

import headrace as hr
from headrace.workers.sample_chunks import ListPart
from headrace.workers.task_runner import TaskRunner
from headrace.workers.tasks import Chain, Finish, Step, Task, TaskMessage

SAMPLES = 2_000


def nothing(sample: Any) -> Any:
    return sample


def drawing_from_rng(_: Any) -> Any:
    return hr.rng().random()


def seeding_by_hand(_: Any) -> Any:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002


WAYS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "seeded": (nothing, True),
    "random=False": (nothing, False),
    "rng": (drawing_from_rng, False),
    "by hand": (seeding_by_hand, False),
}


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    costs: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(options.runs):
        for name, (function, is_random) in WAYS.items():
            costs[name].append(worked_us(function, is_random) - worked_us(nothing, None))
    lines = [[name, tables.spread(costs[name], 2)] for name in WAYS]
    print(tables.markdown(["", "µs a sample"], lines))


def worked_us(function: Callable[[Any], Any], is_random: bool | None) -> float:
    """Microseconds of CPU time for each sample of a task, as a worker process would work on it."""
    runner = TaskRunner(everywhere=True, progress=[-1], number=0)
    chain = Chain((Step("map", "map", function, is_random),))
    runner.learn(1, lambda: chain)
    seconds = 0.0
    for position in (0, SAMPLES):  # the first task is to warm up
        part = ListPart([7] * SAMPLES)
        task = Task(1, 0x5EED, 0, Finish.CHECK, [part], position)
        order = TaskMessage.of(1, task, [part.sent()[0]], None)
        begin = time.process_time()
        runner.work(order)
        seconds = time.process_time() - begin
    return seconds / SAMPLES * 1e6


if __name__ == "__main__":
    main()
