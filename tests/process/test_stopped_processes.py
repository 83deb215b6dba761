"""Workers and fork servers that were stopped: others take their place, nothing is lost or waited for without end."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from process.waiting import trainer, wait_until
from torch.utils.data import Dataset, IterableDataset

import headrace as hr
from headrace.workers.forkserver.client import ForkServer
from headrace.workers.forkserver.stopped_workers import PATIENCE, is_stopped

COUNT = 24


@pytest.fixture(autouse=True)
def patience_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATIENCE, "each_s", 0.02)


class StopsOnce(Dataset[int]):
    """Stops the process that it is in, once in all."""

    def __init__(self, flag: Path, at: int = 9) -> None:
        self.flag, self.at = flag, at

    def __len__(self) -> int:
        return COUNT

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


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
@pytest.mark.parametrize("context", [None, "fork"])
def test_batches_of_a_stopped_worker_are_made_by_another(context: str | None, tmp_path: Path) -> None:
    data = StopsOnce(tmp_path / "stopped")
    assert numbers(hr.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=context)) == list(
        range(COUNT)
    )


def test_warning_says_that_the_worker_was_stopped(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="killed by SIGKILL; it was stopped while it was waited for"):
        numbers(hr.DataLoader(StopsOnce(tmp_path / "stopped"), batch_size=4, num_workers=2))


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_batches_of_a_stopped_worker_are_made_by_another_for_async_loops(tmp_path: Path) -> None:
    async def main() -> list[int]:
        loader = hr.DataLoader(StopsOnce(tmp_path / "stopped"), batch_size=4, num_workers=2)
        return [value async for batch in loader for value in batch.tolist()]

    assert anyio.run(main) == list(range(COUNT))


@pytest.mark.slow
def test_stopped_worker_of_an_iterable_data_set_is_an_error_that_says_so() -> None:
    with pytest.raises(hr.errors.WorkerDiedError, match="it was stopped while it was waited for"):
        numbers(hr.DataLoader(StopsAsItGoes(), batch_size=4, num_workers=1))


@pytest.mark.parametrize("regime", ["economic", "stream"])
def test_samples_of_a_stopped_worker_are_made_by_another(
    regime: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
def test_another_fork_server_starts_the_workers_when_one_is_stopped(
    regime: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
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
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), "it is stopped")
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
        from headrace.workers.forkserver.stopped_workers import PATIENCE
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


def test_timeout_of_the_loader_comes_as_it_did_while_a_worker_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PATIENCE, "each_s", 0.5)
    loader = hr.DataLoader(StopsOnce(tmp_path / "stopped", at=0), batch_size=4, num_workers=1, timeout=1)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1"):
        next(iterator)
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < 60
