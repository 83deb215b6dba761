"""The fork server ends at shutdown, and with a trainer that ends during its start."""

import os
import signal
from pathlib import Path

import pytest
from process.waiting import trainer, wait_until

import headrace as hr
from headrace.workers.forkserver.client import ForkServer

pytestmark = pytest.mark.usefixtures("own_fork_server")


def read() -> list[int]:
    with hr.DataLoader(hr.from_map(range(2)), num_workers=1) as loader:
        return [int(batch) for batch in loader]


@pytest.mark.slow
def test_shutdown_ends_the_fork_server_at_once_and_can_be_repeated() -> None:
    hr.shutdown()
    assert ForkServer._shared is None
    assert read() == [0, 1]
    assert ForkServer._shared is not None
    process = ForkServer._shared.process
    hr.shutdown()
    assert process.returncode == 0
    hr.shutdown()
    assert read() == [0, 1]


def test_nothing_is_left_of_an_idle_fork_server_that_was_killed_when_another_one_takes_its_place() -> None:
    ForkServer.acquire().release()
    killed = ForkServer._shared
    assert killed is not None
    killed.process.kill()
    killed.process.wait()
    ForkServer.acquire().release()
    assert ForkServer._shared is not killed
    assert killed._life == -1, "its pipe is closed; a warning would report an open socket"


@pytest.mark.slow
def test_shutdown_leaves_loaders_that_are_open() -> None:
    with hr.DataLoader(hr.from_map(range(40)), batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        got = next(iterator).tolist()
        assert ForkServer._shared is not None
        process = ForkServer._shared.process
        hr.shutdown()
        assert process.poll() is None
        assert got + [value for batch in iterator for value in batch.tolist()] == list(range(40))
        for _ in range(2):  # a next epoch, too
            assert [value for batch in loader for value in batch.tolist()] == list(range(40))
        del iterator
    wait_until(lambda: process.poll() is not None, "it ends with the last of its users")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_fork_server_that_still_imports_ends_with_the_trainer(how: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        f"import time\nopen({str(tmp_path / 'imports')!r}, 'w').close()\ntime.sleep(60)\n"
    )
    with trainer(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})  # of the fork server, too; torch is here already
        loader = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
        while not os.path.exists({str(tmp_path / "imports")!r}):
            time.sleep(0.01)
        print("made", flush=True)
        if {how == "is killed"}:
            signal.pause()
        """
    ) as running:
        assert running.line() == "made"
        if how == "is killed":
            os.kill(running.pid, signal.SIGKILL)
        assert running.finish() == (
            -signal.SIGKILL if how == "is killed" else 0,
            "",
            "",
        )  # nobody has the pipes any more
