"""Shared memory that tests leave is found; that of other programs is not counted."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import ours
import pytest

Maker = Callable[[], list[str]]
MAKES_NAMES = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

kept = []
for _ in sys.stdin:
    memory, semaphore = SharedMemory(create=True, size=8), multiprocessing.get_context("spawn").Semaphore()
    of_torch = Path(f"/dev/shm/torch_{os.getpid()}_{len(kept)}")
    of_torch.touch()
    kept.append((memory, semaphore, of_torch))
    print(memory.name, "sem." + semaphore._semlock.name.removeprefix("/"), of_torch.name, flush=True)
for memory, _, of_torch in kept:
    memory.unlink()
    of_torch.unlink()
"""


def makers(command: list[str], env: dict[str, str], *, ends_at_once: bool = False) -> Iterator[Maker]:
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    if ends_at_once:  # until it has, what it started is a grandchild of ours, and taken for one
        assert process.wait() == 0

    def make() -> list[str]:
        print(file=process.stdin, flush=True)
        names = process.stdout.readline().split()
        assert all(Path("/dev/shm", name).exists() for name in names)
        assert len(names) == 3
        return names

    yield make
    process.stdin.close()
    assert not process.stdout.read()  # it has ended
    process.stdout.close()
    assert process.wait() == 0


def makers_elsewhere(**marks: str) -> Iterator[Maker]:
    in_background = 'exec 3<&0; "$0" -c "$1" <&3 &'  # the shell ends at once: what it has started is no child of ours
    command = ["sh", "-c", in_background, sys.executable, MAKES_NAMES]
    environment = {name: value for name, value in os.environ.items() if name != ours.MARK} | marks
    yield from makers(command, environment, ends_at_once=True)


@pytest.fixture(scope="module")
def another_program() -> Iterator[Maker]:
    """Has names made by a process that has nothing to do with this one; gives them."""
    yield from makers_elsewhere()


@pytest.fixture
def child() -> Iterator[Maker]:
    yield from makers([sys.executable, "-c", MAKES_NAMES], dict(os.environ))


def test_names_of_another_program_are_no_leak(another_program: Maker) -> None:
    names = another_program()  # they stay beyond this test, and the check after it must not count them either
    assert not ours.shared_names(names)


def test_names_of_a_child_are_found(child: Maker) -> None:
    names = child()
    assert ours.shared_names(names) == set(names)


def test_own_names_are_found_when_held_and_when_named_by_process(scratch_name: str) -> None:
    of_torch = Path(f"/dev/shm/torch_{os.getpid()}_1")
    of_torch.touch()
    with Path("/dev/shm", scratch_name).open("wb"):
        found = ours.shared_names()
    of_torch.unlink()
    assert found >= {scratch_name, of_torch.name}


def test_name_that_nobody_holds(another_program: Maker, scratch_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    another_program()
    Path("/dev/shm", scratch_name).touch()
    assert not ours.shared_names([scratch_name])
    monkeypatch.setattr(ours, "_is_another_python_there", lambda: False)
    assert ours.shared_names([scratch_name]) == {scratch_name}


@pytest.mark.parametrize(("marks", "is_another"), [({}, True), ({ours.BESIDE: "1"}, False)])
def test_python_that_checks_this_tree_beside_the_tests_is_no_other_one(
    marks: dict[str, str], is_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for make in makers_elsewhere(**marks):
        process = int(make()[-1].split("_")[1])
        monkeypatch.setattr(ours, "_pids", lambda process=process: [process])
        assert ours._is_another_python_there() is is_another


@pytest.fixture
def scratch_name() -> Iterator[str]:
    name = f"psm_{uuid.uuid4().hex}"
    yield name
    Path("/dev/shm", name).unlink()


def test_only_the_probe_of_a_folder_for_temporary_files_is_no_leak(tmp_path: Path) -> None:
    for name, body in {"g356hdcz": b"blat", "a_b_c_d_": b"", "tmpg356h": b"data", "tmpg356hdcz": b"blat"}.items():
        (tmp_path / name).write_bytes(body)
    (tmp_path / "a_folder").mkdir()
    found = {path.name for path in tmp_path.iterdir() if not ours.is_probe(path)}
    assert found == {"tmpg356h", "tmpg356hdcz", "a_folder"}
