"""CPU time that a sample's random numbers cost a worker: `randomness.py --runs 7`.

    all, unknown    Python's, numpy's and torch's generators are set: the function calls what is not understood
    all, drawn      the same, and one number of each is drawn
    torch, numpy, random    only that one is set, and drawn from
    rng             the function draws from hr.rng() alone: nothing is set but that
    none            nothing is drawn
    by hand         random=False, and the function calls random.seed, np.random.seed and torch.manual_seed, then draws

Each is the time of a worker's bench for one sample, less that of the same function with random=False in the same run:
what it costs that numbers are a sample's own. "by hand" is compared with the function that only draws. Samples are
ints, or dicts of four fields, which are looked at before a generator is left out. One process, all ways in turns.
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
from headrace.parts import ListPart
from headrace.tasks import Chain, Finish, Step, Task
from headrace.work.messages import TaskMessage
from headrace.work.task_runner import TaskRunner, untold

SAMPLES = 2_000
SAMPLE_KINDS: dict[str, Any] = {
    "int": 7,
    "dict of 4": {"__key__": "000007", "__url__": "train.tar", "jpg": np.zeros((8, 8, 3), np.uint8), "cls": 3},
}


def unknown(sample: Any) -> Any:
    return getattr(sample, "__class__")  # noqa: B009 (may lead anywhere)


def drawing_from_all(_: Any) -> Any:
    return random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002


def drawing_from_torch(_: Any) -> Any:
    return torch.rand(())


def drawing_from_numpy(_: Any) -> Any:
    return np.random.rand()  # noqa: NPY002


def drawing_from_random(_: Any) -> Any:
    return random.random()


def drawing_from_rng(_: Any) -> Any:
    return hr.rng().random()


def drawing_from_none(sample: Any) -> Any:
    return sample


def seeding_by_hand(_: Any) -> Any:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    return random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002


WAYS: dict[str, Callable[[Any], Any]] = {
    "all, unknown": unknown,
    "all, drawn": drawing_from_all,
    "torch": drawing_from_torch,
    "numpy": drawing_from_numpy,
    "random": drawing_from_random,
    "rng": drawing_from_rng,
    "none": drawing_from_none,
}


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    costs: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.runs):
        for kind, sample in SAMPLE_KINDS.items():
            for name, function in WAYS.items():
                cost = worked_us(function, sample, is_random=True) - worked_us(function, sample, is_random=False)
                costs.setdefault((name, kind), []).append(cost)
            cost = worked_us(seeding_by_hand, sample, is_random=False)
            cost -= worked_us(drawing_from_all, sample, is_random=False)
            costs.setdefault(("by hand", kind), []).append(cost)
    names = dict.fromkeys(name for name, _ in costs)
    lines = [[name, *(tables.spread(costs[name, kind], 2) for kind in SAMPLE_KINDS)] for name in names]
    print(tables.markdown(["µs a sample", *SAMPLE_KINDS], lines))


def worked_us(function: Callable[[Any], Any], sample: Any, *, is_random: bool) -> float:
    """Microseconds of CPU time for each sample of a task, as a worker process would work on it."""
    bench = TaskRunner(everywhere=True, progress=untold)
    chain = Chain((Step("map", "map", function, is_random),))
    bench.learn(1, lambda: chain)
    seconds = 0.0
    for position in (0, SAMPLES):  # the first task is to warm up: in it the function is looked at
        part = ListPart([sample] * SAMPLES)
        task = Task(1, 0x5EED, 0, Finish.CHECK, [part], position)
        order = TaskMessage.of(1, task, [part.sent()[0]], None)
        begin = time.process_time()
        bench.work(order)
        seconds = time.process_time() - begin
    return seconds / SAMPLES * 1e6


if __name__ == "__main__":
    main()
