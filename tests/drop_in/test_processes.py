"""Workers seen from other processes: start methods, forks of the trainer, and its exit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in.classes import ThreadLoader, in_processes
from process.waiting import is_running, trainer, wait_until

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

PREAMBLE = """
import multiprocessing, os, sys, threading, warnings
warnings.filterwarnings("ignore", "This DataLoader will create")
import torch
from torch.utils.data import Dataset

"""
IMPORTS = {
    torch.utils.data.DataLoader: "from torch.utils.data import DataLoader\n",
    hr.DataLoader: "from headrace import DataLoader\n",
    ThreadLoader: "import functools, headrace\nDataLoader = functools.partial(headrace.DataLoader, workers='thread')\n",
}


def run(code: str, preamble: str = PREAMBLE) -> list[str]:
    with trainer(code, preamble=preamble) as running:
        returncode, out, err = running.finish(50)
    assert (returncode, err) == (0, "")
    return out.splitlines()


ASKING = """
changed_late = False

class Asking(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        parent = multiprocessing.parent_process()
        return (changed_late, os.getppid(), parent and parent.pid)

def as_is(samples):
    return samples[0]

if __name__ == "__main__":
    changed_late = True
    context = {context}
    for batch in DataLoader(Asking(), num_workers=1, collate_fn=as_is, multiprocessing_context=context):
        changed, parent, answer = batch
        print(changed, parent == os.getpid(), answer == os.getpid())
"""


@pytest.mark.slow
@in_processes
@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("'fork'", "True True True"),
        ("multiprocessing.get_context('fork')", "True True True"),
        ("multiprocessing.get_context('spawn')", "False True True"),
        ("'forkserver'", "False False True"),
    ],
)
def test_named_start_method_is_used(loader_class: type[Any], context: str, expected: str) -> None:
    assert run(IMPORTS[loader_class] + ASKING.replace("{context}", context)) == [expected, expected]


LIVE = """
loader = DataLoader(range(400), batch_size=2, num_workers=2, persistent_workers={persistent})
iterator = iter(loader)
print(next(iterator).tolist(), *(worker.pid for worker in iterator._workers))
{ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_interpreter_exits_well_and_workers_with_it_when_an_iterator_is_live(
    loader_class: type[Any], persistent: bool
) -> None:
    [line] = run(IMPORTS[loader_class] + LIVE.format(persistent=persistent, ending=""))
    assert line.startswith("[0, 1] ")
    pids = [int(pid) for pid in line.removeprefix("[0, 1] ").split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), "the workers are gone")


@pytest.mark.slow
def test_interpreter_exits_by_the_trainers_error_when_an_iterator_is_live(loader_class: type[Any]) -> None:
    code = IMPORTS[loader_class] + LIVE.format(persistent=False, ending="raise ZeroDivisionError('of the trainer')")
    with trainer(code, preamble=PREAMBLE) as running:
        returncode, out, err = running.finish(50)
    assert returncode == 1
    assert err.rstrip().endswith("ZeroDivisionError: of the trainer")
    pids = [int(pid) for pid in out.removeprefix("[0, 1] ").split()]
    wait_until(lambda: not any(map(is_running, pids)), "the workers are gone")


FORKING = """
from headrace import DataLoader

def in_child(act):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            answer = repr(act())
        except BaseException as error:
            answer = f"{isinstance(error, RuntimeError)} {type(error).__name__} {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer.replace(chr(10), " ")

"""


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_child_that_is_forked_mid_epoch_gets_a_clear_error_and_the_trainer_goes_on(persistent: bool) -> None:
    lines = run(
        f"loader = DataLoader(range(400), batch_size=2, num_workers=2, persistent_workers={persistent})\n"
        "iterator, got = iter(loader), []\n"
        "for number, batch in enumerate(iterator):\n"
        "    got += batch.tolist()\n"
        "    if number in (0, 100):\n"
        "        print(in_child(lambda: next(iterator)))\n"
        "        print(in_child(lambda: exec('del iterator, loader', globals())))\n"
        "print(got == list(range(400)))\n"
        "print([x for batch in loader for x in batch.tolist()] == list(range(400)))\n",
        preamble=PREAMBLE + FORKING,
    )
    for answer in (lines[0], lines[2]):
        assert answer.startswith("True ") and "fork" in answer, answer
    assert [lines[1], lines[3]] == ["None", "None"]
    assert lines[4:] == ["True", "True"]


@pytest.mark.slow
def test_child_takes_nothing_and_asks_for_nothing_when_the_next_batch_has_arrived_already(tmp_path: Path) -> None:
    """Batch 1 is there before batch 0: worker 1 releases worker 0 only when it is at batch 3."""
    os.mkfifo(tmp_path / "meeting")
    lines = run(
        "class Meeting(Dataset):\n"
        "    def __len__(self):\n"
        "        return 40\n"
        "    def __getitem__(self, index):\n"
        "        if index in (0, 6):\n"
        f"            open({str(tmp_path / 'meeting')!r}, 'r' if index == 0 else 'w').close()\n"
        "        return index\n"
        "iterator = iter(DataLoader(Meeting(), batch_size=2, num_workers=2, prefetch_factor=2))\n"
        "got = next(iterator).tolist()\n"
        "print(in_child(lambda: next(iterator)))\n"
        "print(got + [x for batch in iterator for x in batch.tolist()] == list(range(40)))\n",
        preamble=PREAMBLE + FORKING,
    )
    assert lines[0].startswith("True ") and "fork" in lines[0], lines[0]
    assert lines[1:] == ["True"]


@pytest.mark.slow
def test_child_of_a_fork_makes_a_loader_of_its_own() -> None:
    lines = run(
        "loader = DataLoader(range(40), batch_size=2, num_workers=2)\n"
        "iterator = iter(loader)\n"
        "got = next(iterator).tolist()\n"
        "print(in_child(lambda: [batch.tolist() for batch in DataLoader(range(4), batch_size=2, num_workers=1)]))\n"
        "print(got + [x for batch in iterator for x in batch.tolist()] == list(range(40)))\n",
        preamble=PREAMBLE + FORKING,
    )
    assert lines == ["[[0, 1], [2, 3]]", "True"]
