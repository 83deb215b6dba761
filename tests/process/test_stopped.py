"""Processes that are stopped while something is waited for: at so many looks in a row, and not by a debugger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.waiting import wait_until

from headrace.workers.forkserver.stopped_workers import PATIENCE, Watch, is_stopped


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def looks_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATIENCE, "each_s", 0.0)


def test_process_is_given_up_when_it_was_stopped_at_so_many_looks_in_a_row(sleeper: subprocess.Popen[bytes]) -> None:
    watch = Watch()
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid), "it is stopped")
    for _ in range(PATIENCE.looks - 1):
        assert watch.look([sleeper.pid]) == []
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: not is_stopped(sleeper.pid), "it runs again")
    assert watch.look([sleeper.pid]) == []
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid), "it is stopped")
    assert [watch.look([sleeper.pid]) for _ in range(PATIENCE.looks)] == [[]] * (PATIENCE.looks - 1) + [[sleeper.pid]]


def test_looks_are_apart_so_that_a_pause_of_this_process_counts_once(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid), "it is stopped")
    monkeypatch.setattr(PATIENCE, "each_s", 1000.0)
    assert all(watch.look([sleeper.pid]) == [] for _ in range(1000))


def files(folder: Path, pid: str, state: str, tracer: int = 0, group: str = "0::/mine\n") -> Path:
    (folder / pid).mkdir(parents=True)
    (folder / pid / "stat").write_text(f"{pid} (a ) b) {state} 1 1")
    (folder / pid / "status").write_text(f"Name:\ta\nTracerPid:\t{tracer}\nUid:\t0\n")
    (folder / pid / "cgroup").write_text(group)
    return folder


@pytest.mark.parametrize(
    ("state", "tracer", "expected"),
    [("T", 0, True), ("T", 7, False), ("t", 7, False), ("R", 0, False), ("S", 0, False)],
)
def test_process_of_a_debugger_is_waited_for(tmp_path: Path, state: str, tracer: int, expected: bool) -> None:
    files(files(tmp_path, "self", "R"), "4", state, tracer)
    assert is_stopped(4, tmp_path) is expected


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("state", ["S", "D"])
def test_process_of_a_frozen_control_group_is_stopped(tmp_path: Path, state: str, frozen: bool) -> None:
    files(files(tmp_path, "self", "R"), "4", state, group="1:cpu:/x\n0::/other/one\n")
    (tmp_path / "groups/other/one").mkdir(parents=True)
    (tmp_path / "groups/other/one/cgroup.events").write_text(f"populated 1\nfrozen {int(frozen)}\n")
    assert is_stopped(4, tmp_path, tmp_path / "groups") is frozen


def test_process_that_is_gone_is_not_stopped(tmp_path: Path) -> None:
    assert not is_stopped(4, tmp_path)
    assert not is_stopped(os.getpid())
