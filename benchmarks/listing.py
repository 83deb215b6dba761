"""How long it takes until the first batch comes of very many single objects, and how much memory that needs.

A fake store lists objects in pages of a thousand, sorted or shuffled, and gives a few bytes for each. Each case runs in
a process of its own. `--objects 1000000` is listed anew, then taken from the list that was kept; `--manifest 50000000`
names are written to a kept list, which is then read. Folders are listed as objects by themselves (files), and as what
lies in the folders of their classes (stream).

    python benchmarks/listing.py --objects 1000000
    python benchmarks/listing.py --manifest 50000000
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path


class Fake:
    """Objects that are nowhere: `many://COUNT-ORDER/…`."""

    def __init__(self, root: str) -> None:
        count, _, order = root.partition("://")[2].partition("-")
        self.count, self.is_shuffled = int(count), order == "shuffled"

    async def get(self, path, start=None, stop=None, *, if_match=None):
        from headrace.types import Answer

        data = path.encode()

        async def body():
            yield data

        return Answer(0, len(data), len(data), f'"{path[-14:]}"', body())

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list]:
        from headrace.types import Listed

        for page in range(0, self.count, 1000):
            at = page * 7919 % self.count // 1000 * 1000 if self.is_shuffled else page
            numbers = range(at, min(at + 1000, self.count))
            names = [f"{prefix}class-{n * 10 // self.count}/photo-{n:010d}.jpg" for n in numbers]
            yield [Listed(name, len(name), f'"{name[-14:]}"') for name in names]

    async def aclose(self) -> None:
        pass


def first_batch(kind: str, place: str, listing: str) -> None:
    import headrace as hr

    hr.plugins.register_store("many", lambda root, storage_options: Fake(root))
    import torch  # noqa: F401 (its import is no part of this)

    began, cpu = time.monotonic(), time.process_time()
    data = getattr(hr, kind)(place, listing=listing).shuffle()
    listed_s = time.monotonic() - began
    batch = next(iter(hr.DataLoader(data, batch_size=64)))
    total_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    assert len(batch["__key__"]) == 64
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own = int(status["RssAnon"].split()[0]) / 1024
    seconds = f"list {listed_s:.2f} s, first batch {total_s:.2f} s (CPU {cpu_s:.2f} s)"
    print(f"{kind} {place} listing={listing}: {len(data):,} objects, {seconds}, "
          f"peak {peak:,.0f} MiB (now {own:,.0f} MiB of its own)")  # fmt: skip


def write_manifest(count: int, place: str) -> None:
    from headrace.indexes.cache_path import names_path
    from headrace.sources.entries import EntriesBuilder, save_entries
    from headrace.types import Listed

    began, folder = time.monotonic(), f"many://{count}-sorted/"
    builder = EntriesBuilder()
    for at in range(0, count, 16384):
        numbers = range(at, min(at + 16384, count))
        names = [f"class-{n * 10 // count}/photo-{n:010d}.jpg" for n in numbers]
        builder.add([Listed(folder + name, len(name), f'"{name[-14:]}"') for name in names])
    about = {"nbytes": None, "left_out": {}, "listed_at": 1}
    save_entries(builder.in_order(len(folder)), names_path(place), about)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count:,} names written in {time.monotonic() - began:.1f} s, peak {peak:,.0f} MiB, "
          f"{names_path(place).stat().st_size / 2**20:,.0f} MiB of disk")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=0)
    parser.add_argument("--manifest", type=int, default=0)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        first_batch(*given.case)
        return
    if given.write:
        write_manifest(int(given.write[0]), given.write[1])
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        cases: list[list[str]] = []
        if given.objects:
            for order in ("sorted", "shuffled"):
                place = f"many://{given.objects}-{order}/**"
                cases += [["--case", "files", place, how] for how in ("new", "kept", "kept")]
                place = f"many://{given.objects}-{order}/"
                cases += [["--case", "stream", place, how] for how in ("new", "kept", "kept")]
        if given.manifest:
            place = f"many://{given.manifest}-sorted/"
            cases += [["--write", str(given.manifest), place]]
            cases += [["--case", kind, place, "kept"] for kind in ("files", "stream", "stream")]
        for case in cases:
            subprocess.run([sys.executable, __file__, *case], check=True)


if __name__ == "__main__":
    main()
