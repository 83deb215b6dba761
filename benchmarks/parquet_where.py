"""What `hr.Parquet(where=…)` reads of tables that are sorted by a column, of which it keeps some rows in a hundred.

    headrace    the groups of rows whose statistics admit some
    pyarrow     pyarrow's own `filters=`; it gives a table, and no samples, so that its CPU seconds are of less

"needed" is of the wanted columns' bytes the share of the rows that are kept. Requests and bytes are counted by the
server, and are the same in each run; CPU seconds are those of the process and all that it starts, for all rows, medians
by turns.

python benchmarks/parquet_where.py [--rounds 5] [--delay d20]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cpu import cpu_s
from server import Server

ROWS, GROUP = 400_000, 10_000
COLUMNS = ["text"]
WAYS = ("headrace", "pyarrow")


def write(path: Path) -> int:
    """Write the table; gives the bytes of the wanted columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (ROWS, 200), np.uint8)
    text = pa.FixedSizeBinaryArray.from_buffers(pa.binary(200), ROWS, [None, pa.py_buffer(letters)])
    table = pa.table({"time": np.arange(ROWS), "text": text.cast(pa.binary()).cast(pa.string())})
    table = table.append_column("label", pa.array(rng.integers(0, 10, ROWS)))
    pq.write_table(table, path, row_group_size=GROUP, compression="zstd", use_dictionary=["label"])
    groups = pq.read_metadata(path)
    return sum(
        groups.row_group(k).column(column).total_compressed_size
        for k in range(groups.num_row_groups)
        for column in range(groups.num_columns)
        if groups.row_group(k).column(column).path_in_schema in COLUMNS
    )


def headrace(url: str, where: list[Any]) -> int:
    import headrace as hr

    data = hr.stream(url, format=hr.Parquet(columns=COLUMNS, where=where))
    return sum(hr.DataLoader(data, batch_size=256, collate_fn=len, num_workers=0))


def pyarrow(url: str, where: list[Any]) -> int:
    import fsspec
    import pyarrow.parquet as pq

    with fsspec.open(url, block_size=2**16) as file:
        return int(pq.read_table(file, columns=COLUMNS, filters=where, pre_buffer=True).num_rows)


def measured(server: Server, read: Callable[[], int], count: int) -> tuple[float, int, int]:
    """(CPU seconds, requests, bytes asked for) of a reading of so many rows."""
    server.reset()
    began = cpu_s()
    got = read()
    seconds = cpu_s() - began
    assert got == count, f"{got} rows came, of {count}"
    said = server.stats()
    return seconds, said["requests"], said["asked_bytes"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", default="d20", help="before each answer, as server.lua has it")
    args = parser.parse_args(argv)
    print(f"{'kept':>6} {'':8} {'CPU s':>8} {'requests':>9} {'MB read':>8} {'read / needed':>14}")
    with tempfile.TemporaryDirectory(prefix="where-") as place, Server(Path(place)) as server:
        folder = Path(place)
        folder.chmod(0o755)
        nbytes = write(folder / "0.parquet")
        for share in (0.001, 0.01, 0.1):
            count = int(ROWS * share)
            start = int(ROWS * 0.37)
            where = [("time", ">=", start), ("time", "<", start + count)]
            runs: dict[str, list[tuple[float, int, int]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    url = f"{server.url}/{args.delay}/0.parquet"
                    read = pyarrow if way == "pyarrow" else headrace
                    runs[way].append(measured(server, partial(read, url, where), count))
            for way, some in runs.items():
                seconds, requests, read_bytes = map(median, zip(*some, strict=True))
                needed = nbytes * share
                print(
                    f"{share:6.1%} {way:8} {seconds:8.3f} {requests:9.0f} {read_bytes / 1e6:8.2f} "
                    f"{read_bytes / needed:14.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
