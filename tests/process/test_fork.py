"""Processes that fork while a loader runs: children deliver nothing, and the parent continues."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.acting import Made
from process.waiting import is_running, output_of, wait_until
from torch.utils.data import IterableDataset

import headrace as hr

CHILD = """
def in_child(act):
    '''What `act` did in a forked child, as text.'''
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            try:
                answer = str(act())
            except BaseException as error:
                answer = f"{type(error).__name__} {error}"
            os.write(writing, answer.encode())
        finally:
            {end}
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return answer, os.waitstatus_to_exitcode(status)

"""


LOADERS = {
    "headrace": "loader = hr.DataLoader(Numbers(400).map(lambda x: x), batch_size=4, num_workers=2)\n",
    "torch": "loader = hr.DataLoader(range(400), batch_size=4, num_workers=2)\n",
    "persistent": "loader = hr.DataLoader(range(400), batch_size=4, num_workers=2, persistent_workers=True)\n",
}
QUIET = "import warnings\nwarnings.filterwarnings('ignore', 'This DataLoader will create')\n"


def forking(code: str, *, end: str = "os._exit(0)") -> list[str]:
    return output_of(QUIET + CHILD.replace("{end}", end) + textwrap.dedent(code)).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("regime", LOADERS)
def test_child_gets_an_error_and_the_parent_goes_on_exactly(regime: str) -> None:
    again = "next(iter(loader))" if regime == "headrace" else "next(it)"  # torch's way starts workers of the child's
    lines = forking(
        LOADERS[regime]
        + textwrap.dedent(f"""
            it = iter(loader)
            got = []
            for number, batch in enumerate(it):
                got += batch.tolist()
                if number in (0, 3, 50):
                    print(in_child(lambda: next(it)))
                    print(in_child(lambda: {again}))
                    print(in_child(lambda: it.close()))
                    print(in_child(lambda: loader.close()))
                    print(in_child(lambda: exec("del it, loader", globals())))
            print(got == list(range(400)))
            print([x for b in loader for x in b.tolist()] == list(range(400)))
            loader.close()
            print(threading.active_count())
        """)
    )
    for of_one in (lines[:5], lines[5:10], lines[10:15]):
        assert all(line.startswith("('LoaderClosedError") and "forked" in line for line in of_one[:2]), of_one
        assert all(line.endswith(", 0)") for line in of_one[:2])
        assert of_one[2:] == ["('None', 0)"] * 3
    assert lines[15:] == ["True", "True", "1"]


@pytest.mark.slow
def test_child_that_exits_as_interpreters_do_leaves_the_parent_alone() -> None:
    lines = forking(
        """
        loader = hr.DataLoader(Numbers(400).map(lambda x: x), batch_size=4, num_workers=2)
        unused = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
        it = iter(loader)
        got = next(it).tolist()
        print(in_child(lambda: unused.close()))
        print(in_child(lambda: "bye"))
        got += [x for b in it for x in b.tolist()]
        print(got == list(range(400)), [b.tolist() for b in unused])
        """,
        end="sys.exit(5)",
    )
    assert lines == ["('None', 5)", "('bye', 5)", "True [[0, 1, 2, 3], [4, 5, 6, 7]]"]


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["headrace", "torch"])
def test_child_can_make_a_loader_of_its_own(regime: str) -> None:
    lines = forking(
        LOADERS[regime]
        + textwrap.dedent(f"""
            def own():
                data = {"Numbers(8)" if regime == "headrace" else "range(8)"}
                with hr.DataLoader(data, batch_size=4, num_workers=2) as another:
                    return [b.tolist() for b in another]

            it = iter(loader)
            got = next(it).tolist()
            print(in_child(own))
            got += [x for b in it for x in b.tolist()]
            print(got == list(range(400)))
        """)
    )
    assert lines == ["('[[0, 1, 2, 3], [4, 5, 6, 7]]', 0)", "True"]


@pytest.mark.slow
def test_child_takes_nothing_when_the_next_batch_has_arrived_already(tmp_path: Path) -> None:
    """Batch 1 is there before batch 0: worker 1 releases worker 0 only when it is at batch 3."""
    os.mkfifo(tmp_path / "meeting")
    lines = forking(f"""
        class Meeting:
            def __len__(self):
                return 40
            def __getitem__(self, index):
                if index in (0, 6):
                    open({str(tmp_path / "meeting")!r}, "r" if index == 0 else "w").close()
                return index
        it = iter(hr.DataLoader(Meeting(), batch_size=2, num_workers=2, prefetch_factor=2))
        got = next(it).tolist()
        print(in_child(lambda: next(it)))
        print(got + [x for batch in it for x in batch.tolist()] == list(range(40)))
    """)
    assert lines[0].startswith("('LoaderClosedError") and "forked" in lines[0], lines[0]
    assert lines[1:] == ["True"]


@pytest.mark.slow
def test_batch_that_a_child_holds_is_not_written_over_by_the_parent() -> None:
    lines = forking("""
        def large(x):
            return np.full(50_000, x, np.float32)

        loader = hr.DataLoader(Numbers(200).map(large), batch_size=4, num_workers=2)
        it = iter(loader)
        batch = next(it)
        go_reading, go_writing = os.pipe()
        is_forked_reading, is_forked_writing = os.pipe()

        def look():
            os.close(go_writing)
            os.write(is_forked_writing, b"x")
            os.read(go_reading, 1)
            return [int(x) for x in batch[:, 0]], bool((batch == batch[:, :1]).all())

        answers = []
        thread = threading.Thread(target=lambda: answers.append(in_child(look)))
        thread.start()
        os.read(is_forked_reading, 1)
        del batch
        for other in it:
            del other
        os.write(go_writing, b"x")
        thread.join()
        print(answers[0])
    """)
    assert lines == ["('([0, 1, 2, 3], True)', 0)"]


COUNT = 24


def forked(folder: Path, ending: Callable[[], Any] | None = None) -> bool:
    """Fork; whether this is the child, whose id is a file's name in the folder by now."""
    child = os.fork()
    if child == 0:
        Path(folder, str(os.getpid())).touch()
        if ending is not None:
            ending()
    return child == 0


def forks(folder: Path, size: int = 1, ending: Callable[[], Any] | None = None) -> Made:
    """Samples of a function that returns in the child as well, with another value."""

    def make(index: int) -> Any:
        is_child = index % 5 == 2 and forked(folder, ending)
        return np.full(size, -1 if is_child else index)

    return Made(make, COUNT)


class ForksAsItGoes(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            yield -1 if index % 5 == 2 and forked(self.folder) else index


def only_originals(batches: Any, folder: Path, children: int = 5) -> None:
    assert [int(torch.as_tensor(sample).flatten()[0]) for batch in batches for sample in batch] == list(range(COUNT))
    wait_until(lambda: len(os.listdir(folder)) == children, "all were forked")
    wait_until(lambda: not any(is_running(int(name)) for name in os.listdir(folder)), "they have ended")


def leave_with_exception() -> None:
    raise ValueError("of the child")


SLOTS = 2000  # numbers in a sample
PLACES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "small samples": (forks, {}),
    "samples in slots": (lambda folder: forks(folder, SLOTS), {}),
    "economic": (forks, {"economic": True}),
    "economic, in slots": (lambda folder: forks(folder, SLOTS), {"economic": True}),
    "exit": (lambda folder: forks(folder, 1, sys.exit), {}),
    "exception": (lambda folder: forks(folder, 1, leave_with_exception), {}),
    "end": (lambda folder: forks(folder, 1, partial(os._exit, 0)), {}),
    "iterable": (ForksAsItGoes, {"num_workers": 1}),
    "step": (lambda folder: hr.from_map(range(COUNT)).map(forks(folder).make), {}),
    "step, in slots": (lambda folder: hr.from_map(range(COUNT)).map(forks(folder, SLOTS).make), {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_child_of_a_data_set_or_step_delivers_nothing(place: str, tmp_path: Path) -> None:
    make, options = PLACES[place]
    with hr.DataLoader(make(tmp_path), **{"batch_size": 4, "num_workers": 2, **options}) as loader:
        only_originals(loader, tmp_path)


@pytest.mark.parametrize("make", [lambda: range(COUNT), lambda: hr.from_map(range(COUNT))], ids=["torch", "ours"])
def test_child_of_a_collate_function_delivers_nothing(make: Callable[[], Any], tmp_path: Path) -> None:
    def collate(samples: list[int]) -> list[int]:
        return [-1] * len(samples) if forked(tmp_path) else samples

    with hr.DataLoader(make(), batch_size=4, num_workers=2, collate_fn=collate) as loader:
        only_originals(loader, tmp_path, COUNT // 4)
