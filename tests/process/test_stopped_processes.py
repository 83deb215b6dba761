"""Workers and fork servers that were stopped: others take their place, nothing is lost or waited for without end."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from drop_in.acting import Made
from process.waiting import trainer, wait_until
from torch.utils.data import IterableDataset

import headrace as hr
from headrace.workers.forkserver.client import ForkServer
from headrace.workers.forkserver.fd_socket import PATIENCE, Watch, is_stopped

COUNT = 24


@pytest.fixture(autouse=True)
def patience_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATIENCE, "each_s", 0.02)


class StopsOnce(Made):
    def __init__(self, flag: Path, at: int = 9) -> None:
        super().__init__(int, COUNT)
        self.flag, self.at = flag, at

    def __getitem__(self, index: int) -> int:
        if index == self.at and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


class StopsAsItGoes(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(COUNT):
            if index == 9:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield index


def numbers(loader: Any) -> list[int]:
    return [value for batch in loader for value in batch.tolist()]


async def async_numbers(loader: Any) -> list[int]:
    return [value async for batch in loader for value in batch.tolist()]


@pytest.mark.parametrize(("context", "is_async"), [(None, False), ("fork", False), (None, True)])
def test_stopped_worker_is_replaced_with_a_warning(context: str | None, is_async: bool, tmp_path: Path) -> None:
    data = StopsOnce(tmp_path / "stopped")
    loader = hr.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=context)
    with pytest.warns(RuntimeWarning, match="killed by SIGKILL; it was stopped while it was waited for"):
        got = anyio.run(async_numbers, loader) if is_async else numbers(loader)
    assert got == list(range(COUNT))


@pytest.mark.slow
def test_stopped_worker_of_an_iterable_data_set_is_an_error_that_says_so() -> None:
    with pytest.raises(hr.errors.WorkerDiedError, match="it was stopped while it was waited for"):
        numbers(hr.DataLoader(StopsAsItGoes(), batch_size=4, num_workers=1))


@pytest.mark.parametrize("regime", ["economic", "stream"])
def test_another_worker_replaces_a_stopped_one(regime: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data: Any = StopsOnce(tmp_path / "stopped")
    if regime == "stream":
        data = hr.from_map(range(COUNT)).map(data.__getitem__)
    options = {"economic": True} if regime == "economic" else {}
    with caplog.at_level(logging.WARNING), hr.DataLoader(data, batch_size=4, num_workers=2, **options) as loader:
        assert numbers(loader) == list(range(COUNT))
    assert "is stopped, and was waited for; it is killed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["economic", "stream"])
@pytest.mark.parametrize("when", ["before the first start", "between two epochs", "with a loader beside it"])
@pytest.mark.usefixtures("own_fork_server")
def test_another_fork_server_replaces_a_stopped_one(regime: str, when: str, caplog: pytest.LogCaptureFixture) -> None:
    data: Any = range(COUNT) if regime != "stream" else hr.from_map(range(COUNT))
    options = {"economic": True} if regime == "economic" else {}

    def read() -> None:
        with hr.DataLoader(data, batch_size=4, num_workers=2, **options) as loader:
            assert numbers(loader) == list(range(COUNT))

    held = ForkServer.acquire() if when == "with a loader beside it" else None
    if when == "before the first start":
        ForkServer.acquire().release()
    else:
        read()
    assert ForkServer._shared is not None
    process = ForkServer._shared.process
    stop(process)
    read()
    assert "another one takes its place" in caplog.text
    if held is not None:
        held.release()
    wait_until(lambda: process.poll() is not None, "the stopped one was ended")


@pytest.mark.slow
def test_nothing_is_killed_when_the_whole_job_is_stopped_and_goes_on() -> None:
    """As by Ctrl-Z and `fg`: the trainer looks at nobody while it is stopped itself."""
    with trainer(
        """
        from headrace.workers.forkserver.fd_socket import PATIENCE
        PATIENCE.each_s = 0.05
        flag = __file__ + ".go"
        def slow(x):
            if x == 5:
                while not os.path.exists(flag):
                    time.sleep(0.01)
            return x
        loader = hr.DataLoader(Numbers(8).map(slow), batch_size=4, num_workers=1)
        it = iter(loader)
        print(next(it).tolist(), flush=True)
        print(*loader._behind._runtime._workers.pids, flush=True)
        print(next(it).tolist(), *loader._behind._runtime._workers.pids, flush=True)
        """
    ) as running:
        assert running.line() == "[0, 1, 2, 3]"
        worker = int(running.line())
        for _ in range(2 * PATIENCE.looks):
            os.killpg(running.pid, signal.SIGSTOP)
            wait_until(lambda: is_stopped(running.pid) and is_stopped(worker), "all are stopped")
            os.killpg(running.pid, signal.SIGCONT)
            wait_until(lambda: not is_stopped(running.pid) and not is_stopped(worker), "all run again")
        script = Path(f"/proc/{running.pid}/cmdline").read_text().split("\0")[-2]
        Path(script + ".go").touch()
        assert running.line() == f"[4, 5, 6, 7] {worker}"
        assert running.finish() == (0, "", "")


def test_timeout_of_the_loader_holds_while_a_worker_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATIENCE, "each_s", 0.5)
    loader = hr.DataLoader(StopsOnce(tmp_path / "stopped", at=0), batch_size=4, num_workers=1, timeout=1)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1"):
        next(iterator)
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < 60


# How a process is found to be stopped: at so many looks in a row, and not by a debugger.


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), "it is stopped")


def test_process_stopped_for_long_is_given_up(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PATIENCE, "each_s", 0.0)
    watch = Watch()
    stop(sleeper)
    for _ in range(PATIENCE.looks - 1):
        assert watch.look([sleeper.pid]) == []
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: not is_stopped(sleeper.pid), "it runs again")
    assert watch.look([sleeper.pid]) == []
    stop(sleeper)
    assert [watch.look([sleeper.pid]) for _ in range(PATIENCE.looks)] == [[]] * (PATIENCE.looks - 1) + [[sleeper.pid]]


def test_pause_of_this_process_is_one_look(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    stop(sleeper)
    monkeypatch.setattr(PATIENCE, "each_s", 1000.0)
    assert all(watch.look([sleeper.pid]) == [] for _ in range(1000))


def files(folder: Path, pid: str, state: str, tracer: int = 0, group: str = "0::/mine\n") -> Path:
    (folder / pid).mkdir(parents=True)
    (folder / pid / "stat").write_text(f"{pid} (a ) b) {state} 1 1")
    (folder / pid / "status").write_text(f"Name:\ta\nTracerPid:\t{tracer}\nUid:\t0\n")
    (folder / pid / "cgroup").write_text(group)
    return folder


@pytest.mark.parametrize(
    ("state", "tracer", "is_frozen", "expected"),
    [
        *(("T", 0, False, True), ("T", 7, False, False), ("t", 7, False, False)),  # 7: a debugger
        ("R", 0, False, False),
        *((state, 0, is_frozen, is_frozen) for state in "SD" for is_frozen in (False, True)),
    ],
)
def test_stopped_process_is_known(tmp_path: Path, state: str, tracer: int, is_frozen: bool, expected: bool) -> None:
    files(files(tmp_path, "self", "R"), "4", state, tracer, group="1:cpu:/x\n0::/other/one\n")
    (tmp_path / "groups/other/one").mkdir(parents=True)
    (tmp_path / "groups/other/one/cgroup.events").write_text(f"populated 1\nfrozen {int(is_frozen)}\n")
    assert is_stopped(4, tmp_path, tmp_path / "groups") is expected


def test_process_that_is_gone_is_not_stopped(tmp_path: Path) -> None:
    assert not is_stopped(4, tmp_path)
    assert not is_stopped(os.getpid())
