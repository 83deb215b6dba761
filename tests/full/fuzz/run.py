"""Looks for inputs that break the readers of formats, with atheris: one target after the other, each in a process.

    python tests/full/fuzz/run.py [TARGET ...]

All together take HEADRACE_FUZZ_SECONDS (600). Under .fuzz/TARGET stay the inputs that reached new code (corpus), which
the next run takes up, and those that failed (crashes), which it tries first; `--input FILE` runs one of them.
An input fails by an exception, by more than a second of CPU time, or by more than 256 MiB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from full.fuzz.targets import CHANGES, target

SECONDS = int(os.environ.get("HEADRACE_FUZZ_SECONDS", "600"))
FOLDER = Path(__file__).parents[3] / ".fuzz"
LONGEST_S = 1.0
STUCK_S = 30  # by the clock, which other programs share
MOST_BYTES = 256 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(CHANGES)}; all")
    parser.add_argument("--input", type=Path, help="a file to give to the one target")
    parser.add_argument("--seconds", type=int, help=argparse.SUPPRESS)  # for the process of one target
    options = parser.parse_args()
    chosen = options.targets or list(CHANGES)
    if set(chosen) - CHANGES.keys() or (options.input and len(chosen) != 1):
        parser.error(f"targets are {', '.join(CHANGES)}; an input goes to one of them")
    if options.input:
        _bounded(_check_of(chosen[0]))(options.input.read_bytes())
        return 0
    if options.seconds:
        _fuzz(chosen[0], options.seconds)  # ends the process
    return max(_started(name, max(SECONDS // len(chosen), 1)) for name in chosen)


def _started(name: str, seconds: int) -> int:
    folder = FOLDER / name
    for part in ("corpus", "crashes"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    command = [sys.executable, __file__, name, "--seconds", str(seconds)]
    with log.open("wb") as output:  # libraries in C write there what they think of their input
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    text = log.read_text(errors="replace")
    runs = re.findall(r"^#(\d+)\t", text, re.MULTILINE)
    found = "nothing found" if code == 0 else f"FAILED ({code}); see {log} and {folder / 'crashes'}"
    print(f"{name}: {int(runs[-1]) if runs else 0:,} inputs in {seconds} s: {found}", flush=True)
    if code:
        print("".join(text.splitlines(keepends=True)[-40:]), flush=True)
    return int(code != 0)


def _fuzz(name: str, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["headrace"]):
        check = _check_of(name)
    folder = FOLDER / name
    for seed in target(name).seeds():
        check(seed)  # also: what is loaded on first use counts for no input
        (folder / "corpus" / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    # no limit on all memory: atheris keeps some of every input; ours is on each of them
    flags = [f"-max_total_time={seconds}", f"-timeout={STUCK_S}", "-rss_limit_mb=0", "-max_len=20000"]
    flags += [f"-artifact_prefix={folder / 'crashes'}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(folder / "corpus"), str(folder / "crashes")], _bounded(check))
    atheris.Fuzz()


def _check_of(name: str) -> Callable[[bytes], None]:
    importlib.import_module("torch")  # which takes longer than an input may
    warnings.simplefilter("ignore")
    return target(name).check


def _bounded(check: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        began, before = time.process_time(), _peak_bytes()
        check(data)
        took_s, more = time.process_time() - began, _peak_bytes() - before
        assert took_s <= LONGEST_S, f"{len(data)} bytes took {took_s:.1f} s"
        assert more <= MOST_BYTES, f"{len(data)} bytes took {more:,} bytes of memory"

    return run


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
