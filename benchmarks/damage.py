"""Damaged archives, read by headrace and by its peers: what each makes of every case of the tests' corpus.

A reader passes a case when it gives the samples that are whole, in order, each byte right, and then raises an error of
its own, or none where the archive is only odd. What it does otherwise:

    silent    it ends without an error, though one was due
    wrong     samples are missing, torn or too many, whatever comes behind them
    refused   an archive that is right is an error
    unclear   the samples are right, and the error is none of the reader's own: a KeyError, an AssertionError
    hang      it takes longer than `--limit-s`

Peers are judged mildly: before an error they may give the sample in front of the damage, or leave out the one before
it. Where a reader supports what headrace refuses, such as sparse members, or has no limits, its right answer counts.
Members that `tarfile` gives are put together as webdataset does. Memory is limited to 4 GiB.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tables

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from corpus import CASES, GROUPS, Case, Sample

FAILURES = ("silent", "wrong", "refused", "unclear", "hang")
Read = Callable[[Path], Iterator[Sample]]


class TooLongError(BaseException):
    """A reader's time is up; no `except Exception` keeps it."""


def by_tarfile(path: Path) -> Iterator[Sample]:
    """Samples as webdataset makes them, of the members that `tarfile` reads."""
    key, fields = "", dict[str, bytes]()
    with tarfile.open(path, "r|", encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            folder, slash, base = member.name.rpartition("/")
            stem, dot, field = base.partition(".")
            body = archive.extractfile(member) if member.isreg() else None
            if body is None or not stem or not dot or (member.name.startswith("__") and member.name.endswith("__")):
                continue
            if folder + slash + stem != key:
                if fields:
                    yield key, fields
                key, fields = folder + slash + stem, {}
            if field.lower() in fields:
                raise tarfile.ReadError(f"{member.name} comes twice")
            fields[field.lower()] = body.read()
    if fields:
        yield key, fields


def by_webdataset(path: Path) -> Iterator[Sample]:
    """Its own data set; that a whole data set is empty, which it would refuse, is nothing of one shard."""
    import webdataset

    for sample in webdataset.WebDataset([str(path)], shardshuffle=False, empty_check=False):
        yield sample["__key__"], {name: body for name, body in sample.items() if not name.startswith("__")}


def by_headrace(path: Path) -> Iterator[Sample]:
    """A stream, read in this process."""
    import headrace as hr

    with hr.DataLoader(hr.stream(path), batch_size=1, collate_fn=list, num_workers=0) as loader:
        for (sample,) in loader:
            yield sample["__key__"], {name: body for name, body in sample.items() if not name.startswith("__")}


def readers() -> dict[str, tuple[Read, tuple[type[Exception], ...]]]:
    """Each reader that is installed, and the errors that it raises on purpose."""
    found: dict[str, tuple[Read, tuple[type[Exception], ...]]] = {"tarfile": (by_tarfile, (tarfile.TarError,))}
    try:
        import webdataset  # noqa: F401

        # of a name that comes twice it raises a ValueError
        found["webdataset"] = (by_webdataset, (tarfile.TarError, ValueError))
    except ImportError:
        print("webdataset is not installed, and left out", file=sys.stderr)
    import headrace as hr

    found["headrace"] = (by_headrace, (hr.HeadraceError,))
    return found


def judge(case: Case, path: Path, read: Read, own: tuple[type[Exception], ...], limit_s: float) -> tuple[str, str]:
    """What a reader did with a case, "" where it passed; and the error that it raised, in words."""
    got: list[Sample] = []
    raised: BaseException | None = None
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        got.extend(read(path))
    except (Exception, TooLongError) as error:
        raised = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    said = "" if raised is None else f"{type(raised).__name__}: {tables.last_line(str(raised))}"
    if isinstance(raised, TooLongError):
        return "hang", said
    if raised is None and case.otherwise is not None and got == list(case.otherwise):
        return "", said
    if raised is None:
        return ("silent" if case.damage is not None else "" if got == list(case.samples) else "wrong"), said
    if case.damage is None:
        return "refused", said
    allowed = [list(case.samples), list(case.samples[:-1]), [*case.samples, case.doubtful]]
    return ("wrong" if got not in allowed else "" if isinstance(raised, own) else "unclear"), said


def stop(number: int, frame: FrameType | None) -> None:
    raise TooLongError


def main() -> None:
    """Judge every case, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=3.0, help="for one case")
    parser.add_argument("--json", type=Path, help="add a line for each case and reader to this file")
    parser.add_argument("--failures", action="store_true", help="name the cases that each reader fails")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))
    found = readers()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shard.tar")
        for case in CASES:
            path.write_bytes(case.data)
            for reader, (read, own) in found.items():
                failure, said = judge(case, path, read, own, options.limit_s)
                rows.append({"case": case.name, "reader": reader, "failure": failure, "error": said})
                tables.append(options.json, rows[-1])
    print(report(rows, list(found)))
    for row in rows if options.failures else ():
        if row["failure"]:
            print(f"{row['reader']:10} {row['failure']:8} {row['case']}  {row['error']}")


def report(rows: list[dict[str, Any]], found: list[str]) -> str:
    """How many cases each reader passes and how it fails the others; then the same by group."""
    ends = {reader: Counter(row["failure"] for row in rows if row["reader"] == reader) for reader in found}
    passed = Counter((row["case"].partition("/")[0], row["reader"]) for row in rows if not row["failure"])
    readers_table = [
        [reader, f"{ends[reader]['']} of {len(CASES)}", *(str(ends[reader][failure]) for failure in FAILURES)]
        for reader in found
    ]
    groups_table = [
        [group, str(len(cases)), *(str(passed[group, reader]) for reader in found)] for group, cases in GROUPS.items()
    ]
    return "\n".join([
        tables.markdown(["reader", "passed", *FAILURES], readers_table),
        tables.markdown(["group", "cases", *found], groups_table),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
