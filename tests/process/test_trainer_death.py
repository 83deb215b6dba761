"""Trainers that end, in any way: their helper and workers end with them, and nothing of ours is on stderr."""

from __future__ import annotations

import os
import signal

import pytest
from process.waiting import children_of, descendants_of, is_running, run_script, trainer, wait_until

BUSY = """
    import glob

    flag = __file__ + ".busy-"

    def busy(x):
        if x >= 88:
            open(flag + str(os.getpid()), "w").close()
            time.sleep(1000)
        return x

    loader = hr.DataLoader(Numbers(400).map(busy), batch_size=4, num_workers=2)
    it = iter(loader)
    for _ in range(20):
        batch = next(it)
    while len(glob.glob(flag + "*")) < 2:
        time.sleep(0.001)
    print(batch.tolist(), flush=True)
"""
IDLE = """
    loader = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
    print([batch.tolist() for batch in loader][0], flush=True)
"""


def processes(pid: int) -> list[int]:
    """The trainer's helper and its two workers, once they are there."""
    wait_until(lambda: len(descendants_of(pid)) == 3, "a helper and two workers run")
    return descendants_of(pid)


@pytest.mark.parametrize(
    ("code", "number"),
    [(BUSY, signal.SIGKILL), (BUSY, signal.SIGTERM), (IDLE, signal.SIGKILL)],
    ids=["busy, SIGKILL", "busy, SIGTERM", "idle, SIGKILL"],
)
def test_helper_and_workers_are_gone_when_the_trainer_is_killed(code: str, number: signal.Signals) -> None:
    with trainer(code + "    signal.pause()\n") as running:
        running.line()
        ours = processes(running.pid)
        os.kill(running.pid, number)
        wait_until(lambda: not any(map(is_running, ours)), "helper and workers are gone", deadline_s=2)
        assert running.finish() == (-number, "", "")


def test_helper_that_still_starts_ends_without_a_word_when_the_trainer_is_killed() -> None:
    with trainer("""
        loader = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
        print("made", flush=True)
        signal.pause()
    """) as running:
        assert running.line() == "made"
        ours = children_of(running.pid)
        assert len(ours) == 1
        os.kill(running.pid, signal.SIGKILL)
        assert running.finish() == (-signal.SIGKILL, "", "")  # the pipes are at their end: nobody has them any more
        wait_until(lambda: not any(map(is_running, ours)), "the helper is gone", deadline_s=2)


def test_workers_of_a_user_who_forked_end_with_the_trainer() -> None:
    """A forked child holds the same sockets open: their end alone would tell nobody."""
    with trainer(
        BUSY
        + """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.closerange(1, 3)
        signal.alarm(20)
        signal.pause()
    print(child, flush=True)
    signal.pause()
    """
    ) as running:
        running.line()
        child = int(running.line())
        ours = [pid for pid in descendants_of(running.pid) if pid != child]
        assert len(ours) == 3
        os.kill(running.pid, signal.SIGKILL)
        try:
            wait_until(lambda: not any(map(is_running, ours)), "helper and workers are gone", deadline_s=2.5)
        finally:
            os.kill(child, signal.SIGKILL)


ENDINGS = {
    "at the end of the script": ("", 0, ""),
    "with an exception": ("    raise ValueError('mine')\n", 1, "ValueError: mine"),
    "with an exit code": ("    sys.exit(7)\n", 7, ""),
    "in a cycle": (
        "    class Box: pass\n    box = Box()\n    box.box, box.it, box.loader = box, it, loader\n    del it, loader\n",
        0,
        "",
    ),
    "in a daemon thread": (
        "    t = threading.Thread(target=lambda: [None for _ in it], daemon=True)\n    t.start()\n",
        0,
        "",
    ),
}


@pytest.mark.parametrize(
    ("ending", "workers"),
    [(ending, 2) for ending in ENDINGS] + [("at the end of the script", 0), ("in a daemon thread", 0)],
)
def test_interpreter_exits_with_a_live_iterator(ending: str, workers: int) -> None:
    code, expected, text = ENDINGS[ending]
    start = f"""
    def step(x):
        time.sleep(0.001)
        return x

    loader = hr.DataLoader(Numbers(100_000).map(step), batch_size=4, num_workers={workers})
    it = iter(loader)
    print(next(it).tolist(), flush=True)
"""
    with trainer(start + code) as running:
        assert running.line() == "[0, 1, 2, 3]"
        returncode, out, err = running.finish(timeout_s=5)
    assert (returncode, out) == (expected, "")
    if text:
        assert err.strip().endswith(text)
        assert err.count("Traceback") == 1
    else:
        assert err == ""


def test_interpreter_exits_with_a_loader_that_was_never_used() -> None:
    code, out, err = run_script("loader = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)\n", timeout_s=10)
    assert (code, out, err) == (0, "", "")


def test_interpreter_exits_while_a_worker_sleeps() -> None:
    with trainer(BUSY) as running:
        running.line()
        assert running.finish(timeout_s=5) == (0, "", "")


def test_warnings_as_errors_find_nothing_to_say_about_an_exit() -> None:
    code, out, err = run_script(
        """
        with hr.DataLoader(Numbers(8).map(lambda x: x + 1), batch_size=4, num_workers=2) as loader:
            print([batch.tolist() for batch in loader])
        another = hr.DataLoader(Numbers(8).map(lambda x: x + 1), batch_size=4, num_workers=2)
        it = iter(another)
        print(next(it).tolist())
        """,
        options=("-X", "dev", "-W", "ignore::DeprecationWarning"),
    )
    assert (code, out) == (0, "[[1, 2, 3, 4], [5, 6, 7, 8]]\n[1, 2, 3, 4]\n")
    assert err == ""
