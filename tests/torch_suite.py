"""Runs torch's own tests of its DataLoader twice, with torch's class and with ours in its place, and compares.

    python tests/torch_suite.py PATH/test_dataloader.py [-k EXPRESSION] [--slow] [--all] [--baseline FILE]

The file is test/test_dataloader.py in torch's source. A copy in a temporary folder replaces torch's class by ours after
each `import torch`, so that processes which the tests spawn, and scripts which they start, use it too.

torch_suite_departures.toml lists intended differences with their reasons. The exit status is 0 if these, and no other
tests, fail with our class only. Needs pytest, pytest-timeout, expecttest and psutil.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import headrace

OURS, TORCHS = "headrace", "torch"
GOOD = ("passed", "xpassed", "skipped")  # xpassed: it passes, though the file expects a failure
_REPLACE = (
    "import torch, torch.utils.data, headrace; "
    "torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = headrace.DataLoader"
)
DEPARTURES = Path(__file__).with_name("torch_suite_departures.toml")
_RECORD = "HEADRACE_TORCH_SUITE_RECORD"  # the file to which the process that runs the tests reports


@dataclass(frozen=True)
class Result:
    outcome: str  # one of GOOD, or "failed", "xfailed", or "died": the process that ran it ended, or it took too long
    reason: str = ""


def main() -> int:
    options = _options()
    theirs = _read(options.baseline) if options.baseline and options.baseline.exists() else None
    if theirs is None:
        theirs = _run(TORCHS, options)
        if options.baseline:
            options.baseline.write_text(json.dumps({name: vars(result) for name, result in theirs.items()}, indent=1))
    ours = _run(OURS, options)
    return _compare(theirs, ours, tomllib.loads(DEPARTURES.read_text()), show_all=options.all)


def pytest_runtest_logstart(nodeid: str) -> None:
    _report(nodeid, "died")  # holds until something better is known


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    elif outcome == "failed" and "Unexpected success" in str(report.longrepr):
        outcome = "xpassed"
    if report.when == "call" or outcome != "passed":
        _report(report.nodeid, outcome, _reason(report))


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]  # why it was skipped
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr or "")
    message = crash.message.partition("\nTo execute this test")[0]
    return f"line {crash.lineno}: {' '.join(message.split())}"


def _report(test: str, outcome: str, reason: str = "") -> None:
    line = json.dumps([test.partition("::")[2], outcome, reason])
    with Path(os.environ[_RECORD]).open("a") as record:
        record.write(line + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="torch's test_dataloader.py")
    parser.add_argument("-k", dest="expression", default="", help="run those tests only, as pytest's -k")
    parser.add_argument("--slow", action="store_true", help="also run what torch marks as slow (minutes)")
    parser.add_argument("--all", action="store_true", help="list all tests, not only those that differ")
    parser.add_argument("--baseline", type=Path, help="file for the results with torch between runs")
    parser.add_argument("--timeout", dest="timeout_s", type=int, default=120, help="seconds for one test")
    return parser.parse_args()


def _run(side: str, options: argparse.Namespace) -> dict[str, Result]:
    with tempfile.TemporaryDirectory() as folder:
        text = options.file.read_text()
        if side == OURS:
            text, count = re.subn(r"^import torch$", _REPLACE, text, flags=re.MULTILINE)
            if not count:
                raise SystemExit(f"{options.file} has no line 'import torch': it is not torch's test file")
        (Path(folder) / options.file.name).write_text(text)
        record, results = Path(folder) / "record", dict[str, Result]()
        while True:
            known, status = len(results), _run_what_is_left(Path(folder) / options.file.name, record, options, results)
            results = _results(record)
            ended = status in (0, 1, 5) and not (results and [*results.values()][-1].outcome == "died")
            if ended or (status == 5 and len(results) == known):
                return results
            if len(results) == known:
                raise SystemExit(f"with {side}'s DataLoader pytest ends before its first test; its output is above")


def _run_what_is_left(file: Path, record: Path, options: argparse.Namespace, done: dict[str, Result]) -> int:
    """Pytest's exit status; it ends early where a test takes its process down, or takes too long."""
    arguments = ["-c", os.devnull, "--rootdir", str(file.parent), "-p", "no:cacheprovider", "-p", Path(__file__).stem]
    limits = ["--timeout", str(options.timeout_s), "--timeout-method", "thread"]  # ends the process, whatever it does
    selected = ["-k", options.expression, *(f"--deselect={file.name}::{test}" for test in done)]
    paths = [str(Path(headrace.__file__).parent.parent), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), _RECORD: str(record)}
    if options.slow:
        environment["PYTORCH_TEST_WITH_SLOW"] = "1"
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments, *limits, *selected, "-q", "--tb=short", "-W", "ignore", file.name],
        cwd=file.parent,
        env=environment,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        return run.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # the workers of a test that did not end, too


def _results(record: Path) -> dict[str, Result]:
    if not record.exists():
        return {}
    results: dict[str, Result] = {}
    for test, outcome, reason in map(json.loads, record.read_text().splitlines()):
        results[test] = Result(outcome, reason)
    return results


def _read(baseline: Path) -> dict[str, Result]:
    return {name: Result(**fields) for name, fields in json.loads(baseline.read_text()).items()}


def _compare(theirs: dict[str, Result], ours: dict[str, Result], departures: dict[str, str], *, show_all: bool) -> int:
    """Print the table; 1 where what fails with our class and not with torch's is not what is to fail."""
    missing = Result("not run")
    worse = {t for t, r in ours.items() if r.outcome not in GOOD and theirs.get(t, missing).outcome in GOOD}
    better = {test for test in departures if test in ours and test not in worse}
    print(f"{'':10} {TORCHS:>9} {OURS:>9}")
    counts = [Counter(side[test].outcome for test in ours if test in side) for side in (theirs, ours)]
    for outcome in dict.fromkeys([*GOOD, *counts[0], *counts[1]]):
        print(f"{outcome:10} {counts[0][outcome]:9} {counts[1][outcome]:9}")
    for test, result in ours.items():
        their = theirs.get(test, missing)
        if show_all or their.outcome != result.outcome:
            why = f" on purpose: {departures[test]}" if test in departures else ""
            print(f"{their.outcome:>9} -> {result.outcome:9} {test}  {result.reason[:300]}{why}")
    print(f"{len(worse)} of {len(ours)} tests fail with {OURS}'s DataLoader and not with {TORCHS}'s,", end=" ")
    print(f"{len(worse & set(departures))} of them on purpose")
    for test in sorted(better):
        print(f"{test} does not fail any more: take it out of {DEPARTURES.name}")
    return 1 if worse - set(departures) or better else 0


if __name__ == "__main__":
    sys.exit(main())
