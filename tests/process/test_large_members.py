"""Memory of a large member of a tar shard, in all processes together."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tars import tar
from process.waiting import output_of

import headrace as hr

MiB = 2**20
LARGE = 128 * MiB
# A partly used segment, and memory of the allocator and of libraries.
SLACK = 0.3

SCRIPT = """
import gc, json, sys
from pathlib import Path
import numpy as np
import headrace as hr
from process.waiting import descendants_of, wait_until, workers_of

FOLDER, WORKERS, TRAINER = Path(sys.path[0]), {workers}, __import__("os").getpid()

def kilobytes(pid, file, name):
    lines = Path(f"/proc/{{pid}}/{{file}}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

def shares():
    "Proportional shares of all processes: what they share is counted once."
    return sum(kilobytes(pid, "smaps_rollup", "Pss") for pid in [TRAINER, *descendants_of(TRAINER)])

def note(sample):
    "While a function has a sample, nothing else moves."
    if len(sample["bin"]) > 2**20:
        Path({folder!r}, "inside").write_text(str(shares()))

def nothing(sample):
    note(sample)

def body(sample):
    note(sample)
    return sample["bin"]

def copy(sample):
    made = np.frombuffer(sample["bin"], np.uint8).copy()
    note(sample)
    return made

def same(samples):
    return samples

def has_torch(number):
    "Workers with such a function start with torch, which is not counted as a copy then."

def loader_of(name, function, batch_size, collate):
    data = hr.stream([str(Path({folder!r}, name))]).map(function)
    return hr.DataLoader(data, batch_size=batch_size, num_workers=WORKERS, collate_fn=collate, timeout=60,
                         worker_init_fn=has_torch)

def measure_idle():
    with loader_of("small.tar", copy, 1, same) as loader:
        for _ in loader:
            pass
        idle = max((kilobytes(pid, "status", "VmRSS") for pid in workers_of(loader)), default=0) if WORKERS else 0
        return idle, kilobytes(TRAINER, "status", "VmRSS"), shares()

def measure(name, function, batch_size=1, collate=same):
    with loader_of(name, function, batch_size, collate) as loader:
        for batch in loader:
            pass
        del batch
        highest = max((kilobytes(pid, "status", "VmHWM") for pid in workers_of(loader)), default=0) if WORKERS else 0
        found = {{
            "inside": int(Path({folder!r}, "inside").read_text()) - free,
            "worker": highest - idle,
            "trainer": kilobytes(TRAINER, "status", "VmHWM") - trainer,
        }}
        wait_until(lambda: shares() - free < {after}, "what the large member took is free again")
    gc.collect()
    print(json.dumps({{key: value * 1024 / {large} for key, value in found.items()}}), flush=True)

idle, trainer, free = measure_idle()
# A trainer's peak is that of all before, too: those that need least come first.
measure("several.tar", nothing, batch_size=4)
measure("one.tar", nothing)
measure("one.tar", body, collate=None)
measure("one.tar", copy)
"""


def write_shard(path: Path, sizes: list[int]) -> None:
    path.write_bytes(tar([(f"{k:06d}", {"bin": bytes(range(256)) * (size // 256)}) for k, size in enumerate(sizes)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Shards: a large member among small ones; several, of some more bytes together; small ones alone."""
    folder = tmp_path_factory.mktemp("large")
    write_shard(folder / "small.tar", [1024] * 16)
    write_shard(folder / "one.tar", [1024] * 4 + [LARGE] + [1024] * 12)
    write_shard(folder / "several.tar", [33 * MiB] * 4 + [1024] * 12)
    yield folder
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [0, 2])
def test_large_member_takes_no_more_copies_than_are_told(folder: Path, workers: int) -> None:
    # The fetched block, the bytes and, if they are sent to the trainer, the batch. Afterwards no more is held than
    # 128 MiB of memory for what will be fetched next.
    kept = 128 * MiB + SLACK * LARGE
    script = SCRIPT.format(workers=workers, folder=str(folder), large=LARGE, after=kept / 1024)
    out = output_of(script, preamble="", timeout_s=150)
    each = [json.loads(line) for line in out.splitlines()]
    most = [1.5, 2, 3, 3]  # of four members one is opened at a time
    for found, bound in zip(each, most, strict=True):
        assert max(found.values()) <= bound + SLACK, (found, bound, out)


def size_of(sample: dict[str, Any]) -> int:
    if sample["__key__"] in ("000001", "000005"):
        raise ValueError(f"not {sample['__key__']}")
    return len(sample["bin"])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [0, 2])
def test_failures_among_large_members_are_left_out_and_no_others(folder: Path, workers: int) -> None:
    data = hr.stream([str(folder / "several.tar")]).map(size_of)
    with hr.DataLoader(data, batch_size=4, num_workers=workers, errors=hr.Skip(), collate_fn=list) as loader:
        batches = list(loader)
    sizes = [33 * MiB] * 4 + [1024] * 12
    kept = [size for k, size in enumerate(sizes) if k not in (1, 5)]
    assert [size for batch in batches for size in batch] == kept
    with (
        hr.DataLoader(data, batch_size=16, num_workers=workers) as loader,
        pytest.raises(ValueError, match="not 000001"),
    ):
        next(iter(loader))
