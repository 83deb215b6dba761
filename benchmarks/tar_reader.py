"""CPU time to find the members of tar archives in memory: members per second of one core.

    headrace            headrace.formats.tar.scanner.TarScanner, fed buffers of `--buffer-mib`: names grouped to samples
    headrace, general   the same, each header read for itself, as those that are not plain are
    tarfile             Python's own, header by header, without reading bodies

All verify the checksum of each header. The archives are the benchmarks' own: "small" has members of 1.6 KB and of a few
bytes in turn, "large" of 60 to 110 KB and of a few bytes. One thread, all in turns.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import tables
from data import DATA, ensure

from headrace.formats.tar.scanner import TarScanner

ARCHIVES = {"small": "small/00000.tar", "large": "wds/00000.tar"}
Read = Callable[[bytes, int], int]


class OneByOne(TarScanner):
    """The general way alone."""

    longest_run = 0


def by_scanner(data: bytes, buffer_bytes: int, kind: type[TarScanner] = TarScanner) -> int:
    """How many members the scanner finds."""
    scanner, view, members = kind("memory"), memoryview(data), 0
    for start in range(0, len(data), buffer_bytes):
        stop = start + buffer_bytes
        members += len(scanner.feed(view[start:stop], start, stop >= len(data)).offset)
    if scanner.error:
        raise scanner.error
    return members


def by_tarfile(data: bytes, _buffer_bytes: int) -> int:
    """How many members `tarfile` finds."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        return sum(1 for _ in archive)


READERS: dict[str, Read] = {
    "headrace": by_scanner,
    "headrace, general": lambda data, buffer_bytes: by_scanner(data, buffer_bytes, OneByOne),
    "tarfile": by_tarfile,
}


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--buffer-mib", type=int, default=8)
    parser.add_argument("--json", type=Path, help="add a JSON line for each run to this file")
    options = parser.parse_args()
    ensure("small", "wds")
    archives = {name: (DATA / path).read_bytes() for name, path in ARCHIVES.items()}
    rates: dict[tuple[str, str], list[float]] = {(reader, name): [] for reader in READERS for name in archives}
    for run in range(options.runs):
        for (reader, name), known in rates.items():
            known.append(rate(READERS[reader], archives[name], options.buffer_mib * 2**20))
            row = {"reader": reader, "archive": name, "run": run, "buffer_mib": options.buffer_mib}
            tables.append(options.json, row | {"members_per_cpu_s": known[-1]})
    rows = [[reader, *(tables.spread(rates[reader, name]) for name in archives)] for reader in READERS]
    print(tables.markdown(["members/s of CPU time", *archives], rows))


def rate(read: Read, data: bytes, buffer_bytes: int, enough_s: float = 0.2) -> float:
    """Members per second of CPU time, over as many readings as take a while."""
    members = 0
    begin = time.process_time()
    while (spent := time.process_time() - begin) < enough_s or not members:
        members += read(data, buffer_bytes)
    return members / spent


if __name__ == "__main__":
    main()
