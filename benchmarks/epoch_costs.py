"""What an epoch costs beside its samples: its start, an early end, and the wait for a batch that is ready.

    start        persistent workers: from `iter` to the first batch, after a whole epoch
    break        from `break` after the first batch to the end of the loop statement; the workers end with it
    statement    the whole of that statement: workers start, one batch comes, workers end
    break kept   the same break with persistent workers
    start again  persistent workers: from `iter` to the first batch, after such a break
    wait         the time in `next`, while the trainer computes for longer than a batch takes to be made

Samples are Python ints, so that nothing of them is in these times; "wait, images" is with batches of 38 MB, which the
trainer does not look at. Each run gives the median of its repetitions; headrace's fork server is ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import drop_ins
import rounds
import tables
import torch
from fresh import Row
from local_samples import Images, Numbers

WORKERS = 2
WARM_UP = 2
COLUMNS = {
    "start_ms": "start, ms",
    "break_ms": "break, ms",
    "statement_ms": "statement, ms",
    "break_kept_ms": "break kept, ms",
    "start_again_ms": "start again, ms",
    "wait_us": "wait, µs",
    "wait_images_us": "wait, images, µs",
}


def main() -> None:
    """Measure, then print the table."""
    parser = drop_ins.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=20, help="epochs of each kind in a run")
    parser.add_argument("--waits", type=int, default=100, help="batches of ints that are waited for in a run")
    parser.add_argument("--step-ms", type=float, default=80.0, help="computed for each batch of images")
    options = drop_ins.parse(parser, costs)
    settings = {"repeat": options.repeat, "waits": options.waits, "step_ms": options.step_ms}
    rows = drop_ins.rows_of(__file__, [{"loader": name} | settings for name in options.loader], options)
    print("\n" + report(rows))


def costs(job: Row) -> Iterator[Row]:
    """In the fresh process: everything, one after the other."""

    def loader(batches: int, **options: Any) -> Any:
        return drop_ins.make(job["loader"], Numbers(4 * batches), batch_size=4, num_workers=WORKERS, **options)

    drop_ins.warm_up(job["loader"])
    yield {}
    repeat = range(job["repeat"] + WARM_UP)
    row: Row = {}
    kept = loader(10, persistent_workers=True)
    row["start_ms"] = typical_ms(whole_epoch(kept) for _ in repeat)
    started_each_time = loader(1000)
    begun, ended = zip(*(early_break(started_each_time) for _ in repeat), strict=True)
    row["break_ms"] = typical_ms(ended)
    row["statement_ms"] = typical_ms(map(sum, zip(begun, ended, strict=True)))
    kept = loader(1000, persistent_workers=True)
    begun, ended = zip(*(early_break(kept) for _ in repeat), strict=True)
    row["break_kept_ms"], row["start_again_ms"] = typical_ms(ended), typical_ms(begun)
    del kept
    count = job["waits"] + WARM_UP
    row["wait_us"] = 1e3 * typical_ms(waits(loader(count + 100), count, 0.002))
    count = job["waits"] // 5 + WARM_UP
    images = drop_ins.make(job["loader"], Images(64 * (count + 20)), batch_size=64, num_workers=WORKERS)
    row["wait_images_us"] = 1e3 * typical_ms(waits(images, count, job["step_ms"] / 1000))
    yield row


def typical_ms(seconds: Iterable[float]) -> float:
    """The median, without the first ones."""
    return 1e3 * median(list(seconds)[WARM_UP:])


def whole_epoch(loader: Iterable[Any]) -> float:
    """Seconds from `iter` to the first batch; then the rest."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - start
    for _ in batches:
        pass
    return seconds


def early_break(loader: Iterable[Any]) -> tuple[float, float]:
    """Seconds from the beginning of a loop to its first batch, and from there to the end of the statement."""
    start = first = time.perf_counter()
    for _ in loader:
        first = time.perf_counter()
        break
    return first - start, time.perf_counter() - first


def waits(loader: Iterable[Any], count: int, step_s: float) -> Iterator[float]:
    """Seconds in `next` of a trainer that computes for `step_s` before each; batches are dropped outside of them."""
    batches = iter(loader)
    numbers = torch.ones(128, 128)
    for _ in range(count):
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            numbers @ numbers
        start = time.perf_counter()
        batch = next(batches)
        seconds = time.perf_counter() - start
        del batch
        yield seconds


def report(rows: list[Row]) -> str:
    """A line for each loader."""
    lines = []
    for (loader,), mine in rounds.group(rows, "loader").items():
        spreads = [tables.spread((row.get(name) for row in mine), 0 if name.endswith("us") else 1) for name in COLUMNS]
        lines.append([loader, rounds.counted(mine), *spreads])
    return tables.markdown(["loader", "runs", *COLUMNS.values()], lines)


if __name__ == "__main__":
    main()
