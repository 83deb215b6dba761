"""What 500 early ends of an epoch leave behind, and what one costs: `early_breaks.py --runs 5`.

Each takes the first batch of W2, with two workers, and leaves the loop. "same": 500 iterators of one loader. "new": 500
loaders. Counted before (after five breaks, so that what stays for good is there) and after: threads of the trainer,
processes below it, file descriptors of all of them, entries of /dev/shm, the trainer's resident memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import contestants
import data
import psutil
import rounds
import tables
from fresh import Row
from server import Server
from workloads import W2

WARM_UP_BREAKS = 5
SETTLE_S = 5.0
COUNTED = ("threads", "processes", "descriptors", "shm_entries")


def main() -> None:
    """Measure, then print the table."""
    parser = rounds.parser(__doc__)
    parser.add_argument(
        "--contestant", nargs="+", choices=["headrace", "torch_dl", "spdl", "wds"], default=["headrace"]
    )
    parser.add_argument("--mode", nargs="+", choices=["same", "new"], default=["same", "new"])
    parser.add_argument("--breaks", type=int, default=500)
    options = rounds.parse(parser, many_breaks)
    jobs = [{"contestant": c, "mode": m, "breaks": options.breaks} for c in options.contestant for m in options.mode]
    server = Server(data.DATA, lambda: data.ensure("wds"))
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server, limit_s=900)))


def many_breaks(job: Row) -> Iterator[Row]:
    """In the fresh process: break, again and again."""
    contestant = contestants.load(job["contestant"])
    parameters = {"num_workers": 2} if job["contestant"] != "spdl" else {"fetch": 4, "threads": 4}
    contestants.prepare(contestant, W2, parameters)
    yield {}
    kept = contestant.run(W2, parameters) if job["mode"] == "same" else None

    def leave_early() -> float:
        start = time.perf_counter()
        for _ in kept if kept is not None else contestant.run(W2, parameters):
            break
        return time.perf_counter() - start

    for _ in range(WARM_UP_BREAKS):
        leave_early()
    time.sleep(0.5)
    before = census()
    times = [leave_early() for _ in range(job["breaks"])]
    start = time.perf_counter()
    while census_differs(before, after := census()) and time.perf_counter() - start < SETTLE_S:
        gc.collect()
        time.sleep(0.02)
    settle_s = time.perf_counter() - start
    yield {
        "before": before,
        "after": after,
        "settle_s": settle_s,
        "break_ms": 1e3 * median(times),
        "slowest_ms": 1e3 * max(times),
    }


def census() -> dict[str, int]:
    """What there is now of everything that could be left behind."""
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    descriptors = 0
    for process in processes:
        try:
            descriptors += process.num_fds()
        except psutil.NoSuchProcess:
            continue
    return {
        "threads": me.num_threads(),
        "processes": len(processes) - 1,
        "descriptors": descriptors,
        "shm_entries": len(list(Path("/dev/shm").iterdir())),
        "rss": me.memory_info().rss,
    }


def census_differs(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether anything countable is more than it was."""
    return any(after[name] > before[name] for name in COUNTED)


def report(rows: list[Row]) -> str:
    """A line for each contestant and mode."""
    lines = []
    for (contestant, mode), mine in rounds.group(rows, "contestant", "mode").items():
        good = [row for row in mine if "before" in row]
        head = [f"{contestant} {mode}", rounds.counted(mine)]
        if not good:
            lines.append(head)
            continue
        counts = [
            f"{median(row['before'][name] for row in good):.0f} → {tables.spread(row['after'][name] for row in good)}"
            for name in COUNTED
        ]
        growth = tables.spread(((row["after"]["rss"] - row["before"]["rss"]) / 2**20 for row in good), 1)
        costs = [tables.spread(row[name] for row in good) for name in ("break_ms", "slowest_ms")]
        lines.append([*head, *counts, growth, *costs, tables.spread((row["settle_s"] for row in good), 2)])
    columns = ["loader", "runs", "threads", "processes", "descriptors", "/dev/shm entries", "trainer's RSS, MiB more"]
    return tables.markdown([*columns, "ms per break", "slowest, ms", "settled after, s"], lines)


if __name__ == "__main__":
    main()
