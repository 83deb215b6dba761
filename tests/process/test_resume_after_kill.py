"""A trainer that is killed at any moment resumes exactly from its last state."""

import json
import os
import random
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.tars import index_file, index_of_archive, numbered_samples, tar
from process.waiting import output_of, trainer

from headrace.testing import FaultServer

KILLS = int(os.environ.get("HEADRACE_KILLS", "8"))
COUNTS = (30, 0, 41, 12, 77)
Batch = list[list[int]]

LOADER = """
import json, os, sys, zlib
import headrace as hr

def seen(sample):
    return {{"n": int(sample["cls"]), "crc": zlib.crc32(sample["bin"]), "random": int(hr.rng().integers(1 << 40))}}

def rows_of(batch):
    return list(map(list, zip(*(batch[name].tolist() for name in ("n", "crc", "random")))))

def save(state):
    state_path.with_suffix(".new").write_text(json.dumps(state))
    os.replace(state_path.with_suffix(".new"), state_path)

urls, index = {urls!r}, {index!r}
data = hr.stream(urls, index=index).shuffle("window", window=40).map(seen)
"""
WHOLE = """
with hr.DataLoader(data, batch_size=4) as loader:
    print(json.dumps([[rows_of(batch) for batch in loader] for _ in range(2)]))
"""
KILLED = """
from pathlib import Path
import random

state_path, log = Path({folder!r}, "state.json"), open(Path({folder!r}, "batches.jsonl"), "a", buffering=1)
dice = random.Random({seed})
options = {{"num_workers": dice.choice([0, 0, 1]), "fetch": hr.Fetch(concurrency=dice.choice([1, 64]))}}
with hr.DataLoader(data, batch_size=4, **options) as loader:
    if state_path.exists():
        loader.load_state_dict(json.loads(state_path.read_text()))
    while loader.epoch < 2:
        epoch = loader.epoch
        for batch in loader:
            log.write(json.dumps([epoch, loader.position.batch, rows_of(batch)]) + "\\n")
            save(loader.state_dict())
            print("batch", flush=True)
        save(loader.state_dict())
    print("over", flush=True)
"""


@pytest.fixture(scope="module")
def loader_code() -> Iterator[str]:
    with FaultServer() as server:
        urls, entries, first = [], [], 0
        for k, count in enumerate(COUNTS):
            archive = tar(numbered_samples(first, count, 100))
            urls.append(server.add(f"{k}.tar", archive))
            entries.append((urls[-1], index_of_archive(urls[-1], archive)))
            first += count
        index = server.add("all.hri", index_file(entries))
        yield LOADER.format(urls=urls, index=index)


@pytest.mark.slow
@pytest.mark.timeout(20 * KILLS + 60)
def test_trainer_goes_on_exactly_when_it_is_killed_at_any_moment(loader_code: str, tmp_path: Path) -> None:
    """Batches that were logged after the last state are repeated unchanged."""
    expected: list[list[Batch]] = json.loads(output_of(loader_code + WHOLE))
    checksums = [zlib.crc32(fields["bin"]) for _, fields in numbered_samples(0, sum(COUNTS), 100)]
    for epoch in expected:
        assert sorted(row[:2] for batch in epoch for row in batch) == list(map(list, enumerate(checksums)))
    dice, kills = random.Random(6), 0
    many = 2 * len(expected[0]) * 3 // (2 * KILLS)
    while True:
        code = loader_code + KILLED.format(folder=str(tmp_path), seed=kills)
        with trainer(code, preamble="") as running:
            most = dice.randint(0, many) if kills < KILLS else 10**6
            received = 0
            while received < most and running.line() != "over":
                received += 1
            if received < most:
                assert running.finish()[0] == 0
                break
            kills += 1
            os.kill(running.pid, signal.SIGKILL)  # it may be anywhere by now
    got: dict[tuple[int, int], Batch] = {}
    logged = 0
    for line in (tmp_path / "batches.jsonl").read_text().splitlines():
        epoch, number, batch = json.loads(line)
        assert got.setdefault((epoch, number), batch) == batch
        logged += 1
    assert kills == KILLS
    assert logged - len(got) <= KILLS  # at most one batch for each kill
    assert [[got[epoch, number + 1] for number in range(len(expected[epoch]))] for epoch in range(2)] == expected
