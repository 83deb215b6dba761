"""The first batch comes as soon as its own samples are made, whatever the next ones take."""

import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from builders.numbers import Numbers
from process.waiting import output_of

import headrace as hr


def gate(path: str, first: int) -> Callable[[int], int]:
    """A map whose samples from `first` on wait for the file at `path`."""

    def wait(index: int) -> int:
        while index >= first and not Path(path).exists():
            time.sleep(0.005)
        return index

    return wait


@pytest.mark.slow
@pytest.mark.parametrize("collate", [None, list], ids=["in slots", "by one worker"])
def test_first_batches_come_while_later_samples_are_still_made(tmp_path: Path, collate: Any) -> None:
    path = tmp_path / "open"
    data = Numbers(24).map(gate(str(path), 8))
    with hr.DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate) as loader:
        batches = iter(loader)
        got = [next(batches), next(batches)]
        path.touch()
        got += batches
    assert [list(map(int, batch)) for batch in got] == [list(range(k, k + 4)) for k in range(0, 24, 4)]


@pytest.mark.slow
def test_all_workers_may_hold_results_when_batches_need_more_room_than_there_is() -> None:
    """Every batch is larger than the last: none fits where the one before it lay."""
    data = Numbers(24).map(lambda index: bytes(2**16 * (index + 1)))
    with hr.DataLoader(data, batch_size=2, num_workers=2, collate_fn=list, memory_budget="1MiB") as loader:
        lengths = [len(sample) for batch in loader for sample in batch]
    assert lengths == [2**16 * (index + 1) for index in range(24)]


# modules that a worker may import before its first sample: each takes time in each worker
WORKERS_LOAD = [
    "errors",
    "types",
    "_util.*",
    "formats.*",
    "sources.item_calls",
    "torch_compat.*",
    "torch_regime.workers.*",
    "workers.*",
]


PROBE = """
import sys
import headrace as hr

def loaded(_):
    return sorted(name for name in sys.modules if name.startswith("headrace."))

with hr.DataLoader(hr.from_map([0]).map(loaded), batch_size=None, num_workers=1) as loader:
    print(*next(iter(loader)))
"""


def test_workers_load_no_part_of_the_engine() -> None:
    # In a process of its own: the fork server of this one may have imported what other tests' functions need.
    names = output_of(PROBE, preamble="").split()
    patterns = [f"headrace.{pattern}" for pattern in WORKERS_LOAD]
    more = [name for name in names if not any(fnmatch(name, one) or one.startswith(f"{name}.") for one in patterns)]
    assert not more, "move what workers run out of these, or what these import"
