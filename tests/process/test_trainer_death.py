"""Trainers that end or are interrupted, in any way: processes end with them, and states are exact."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from builders.numbers import Numbers
from process.waiting import descendants_of, is_running, run_script, trainer, wait_until

import headrace as hr

pytestmark = pytest.mark.timeout(300)  # each starts interpreters that import torch, and waits for their ends
START_S = 100.0  # an interpreter that imports torch on a busy machine
END_S = 20.0  # less than a fork server that was forgotten stays for a next loader
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
    """The trainer's fork server and its two workers, once they are there."""
    wait_until(lambda: len(descendants_of(pid)) == 3, "a fork server and two workers run", START_S)
    return descendants_of(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "number"),
    [(BUSY, signal.SIGKILL), (BUSY, signal.SIGTERM), (IDLE, signal.SIGKILL)],
    ids=["busy, SIGKILL", "busy, SIGTERM", "idle, SIGKILL"],
)
def test_fork_server_and_workers_are_gone_when_the_trainer_is_killed(code: str, number: signal.Signals) -> None:
    with trainer(code + "    signal.pause()\n") as running:
        running.line()
        ours = processes(running.pid)
        os.kill(running.pid, number)
        wait_until(lambda: not any(map(is_running, ours)), "fork server and workers are gone", END_S)
        assert running.finish(END_S) == (-number, "", "")


@pytest.mark.slow
def test_workers_of_a_user_who_forked_end_with_the_trainer() -> None:
    """A forked child holds the same sockets open: so their end is not seen."""
    with trainer(
        BUSY
        + """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.closerange(1, 3)
        signal.alarm(250)
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
            wait_until(lambda: not any(map(is_running, ours)), "fork server and workers are gone", END_S)
        finally:
            os.kill(child, signal.SIGKILL)


LIVE = """
    def step(x):
        time.sleep(0.001)
        return x

    loader = hr.DataLoader(Numbers(100_000).map(step), batch_size=4, num_workers={workers})
    it = iter(loader)
    next(it)
"""
LIVE_2, LIVE_0 = LIVE.format(workers=2), LIVE.format(workers=0)
IN_A_CYCLE = """
    class Box: pass
    box = Box()
    box.box, box.it, box.loader = box, it, loader
    del it, loader
"""
IN_A_THREAD = """
    t = threading.Thread(target=lambda: [None for _ in it], daemon=True)
    t.start()
"""
# The script, its exit code, and what its error ends with.
ENDINGS = {
    "at the end of the script": (LIVE_2, 0, ""),
    "at the end of the script, no workers": (LIVE_0, 0, ""),
    "with an exception": (LIVE_2 + "    raise ValueError('mine')\n", 1, "ValueError: mine"),
    "with an exit code": (LIVE_2 + "    sys.exit(7)\n", 7, ""),
    "in a cycle": (LIVE_2 + IN_A_CYCLE, 0, ""),
    "in a daemon thread": (LIVE_2 + IN_A_THREAD, 0, ""),
    "in a daemon thread, no workers": (LIVE_0 + IN_A_THREAD, 0, ""),
    "loader that was never used": ("hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)\n", 0, ""),
    "while a worker sleeps": (BUSY.replace("    print(batch.tolist(), flush=True)\n", ""), 0, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_exits_well_or_by_the_error_of_the_trainer(ending: str) -> None:
    code, expected, text = ENDINGS[ending]
    returncode, out, err = run_script(code, timeout_s=START_S)
    assert (returncode, out) == (expected, "")
    assert err.strip().endswith(text)
    assert err.count("Traceback") == bool(text), err
    assert text or not err


@pytest.mark.slow
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
        timeout_s=START_S,
    )
    assert (code, out) == (0, "[[1, 2, 3, 4], [5, 6, 7, 8]]\n[1, 2, 3, 4]\n")
    # The duration of callbacks depends on the load of the machine.
    assert [line for line in err.splitlines() if not line.startswith("Executing <")] == []


def test_fork_server_imports_nothing_when_it_was_let_go_of_before_it_began() -> None:
    """The trainer waits for it: `hr.shutdown()` right after a loader was made, or a program of one line."""
    script = """
        import os, socket, subprocess, sys

        code = "import sys; from headrace.workers.forkserver.server import main; main({}, {}, {}, True)"
        code += "; print('torch' in sys.modules)"
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        os.close(writing)
        command = [sys.executable, "-c", code.format(theirs.fileno(), os.getpid(), reading)]
        ours.close()
        subprocess.run(command, pass_fds=[theirs.fileno(), reading], check=True)
        """
    assert run_script(script, preamble="", timeout_s=START_S) == (0, "False\n", "")


def test_interpreter_exits_without_a_word_when_descriptors_go_after_the_module_that_closes_them() -> None:
    script = """
        import codecs, tempfile
        import headrace._util.shared_memory, headrace._util.wakeup

        # Modules that something keeps are emptied one by one, what was imported last first.
        codecs.register(lambda name, kept=(tempfile, headrace._util.shared_memory, headrace._util.wakeup): None)
        tempfile.kept = headrace._util.shared_memory.Segment.create(8), headrace._util.wakeup.Wakeup()
        """
    assert run_script(script, preamble="", timeout_s=START_S) == (0, "", "")


LOOP = """
    def step(x):
        {work}
        return x

    loader = hr.DataLoader(Numbers(100_000).map(step), batch_size=4, num_workers={workers})
    {loop}
"""
SYNC = """
    for number, batch in enumerate(loader):
        if number == 2:
            print("going", flush=True)
"""
WAITING = """
    it = iter(loader)
    print("going", flush=True)
    next(it)
"""
ASYNC = """
    import asyncio

    async def main():
        number = 0
        async for batch in loader:
            number += 1
            if number == 2:
                print("going", flush=True)

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "workers"), [("sync", 0), ("sync", 2), ("waiting", 2), ("async", 2)])
def test_ctrl_c_is_one_keyboard_interrupt_and_nothing_stays(loop: str, workers: int) -> None:
    work = "time.sleep(1000)" if loop == "waiting" else "time.sleep(0.0005)"
    code = LOOP.format(work=work, workers=workers, loop={"sync": SYNC, "waiting": WAITING, "async": ASYNC}[loop])
    with trainer(code) as running:
        assert running.line() == "going"
        if workers:
            wait_until(lambda: len(descendants_of(running.pid)) == 3, "a fork server and two workers run")
        ours = descendants_of(running.pid)
        os.killpg(running.pid, signal.SIGINT)
        returncode, out, err = running.finish(timeout_s=10)
        wait_until(lambda: not any(map(is_running, ours)), "fork server and workers are gone")
    # CPython itself forgets, now and then, to end by the signal when a daemon thread still runs.
    assert returncode in ((-signal.SIGINT,) if workers else (-signal.SIGINT, 1)), err
    assert out == ""
    assert err.count("\nKeyboardInterrupt") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "headrace/workers" not in err and "fork server" not in err, err


@pytest.mark.slow
def test_ctrl_c_while_the_fork_server_starts_is_one_keyboard_interrupt() -> None:
    with trainer("""
        loader = hr.DataLoader(Numbers(100), batch_size=4, num_workers=2)
        print("going", flush=True)
        signal.pause()
    """) as running:
        assert running.line() == "going"
        os.killpg(running.pid, signal.SIGINT)
        returncode, _, err = running.finish(timeout_s=10)
    assert returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1, err
    assert err.count("Traceback") == 1, err


def test_loop_goes_on_exactly_after_a_ctrl_c_that_was_caught() -> None:
    with trainer("""
        go_on = __file__ + ".go"

        def step(x):
            while x >= 40 and not os.path.exists(go_on):
                time.sleep(0.001)
            return x

        loader = hr.DataLoader(Numbers(1200).map(step), batch_size=4, num_workers=2)
        it, got, caught = iter(loader), [], 0
        while True:
            try:
                if len(got) == 40 and not caught:
                    print("going", flush=True)
                batch = next(it)
            except KeyboardInterrupt:
                caught += 1
                open(go_on, "w").close()
                continue
            except StopIteration:
                break
            got += batch.tolist()
        loader.close()
        print(caught, got == list(range(1200)), threading.active_count(), flush=True)
    """) as running:
        assert running.line() == "going"
        os.killpg(running.pid, signal.SIGINT)
        returncode, out, err = running.finish()
    assert (returncode, err) == (0, "")
    assert out == "1 True 1\n"


COUNT, BATCH = 400, 4
EVERY_S = 0.0005


def loader_of(regime: str, workers: int) -> hr.DataLoader[Any]:
    data: Any = Numbers(COUNT) if regime == "headrace" else list(range(COUNT))
    is_economic = regime == "economic"
    return hr.DataLoader(
        data, batch_size=BATCH, shuffle=regime == "headrace", num_workers=workers, economic=is_economic
    )


@contextmanager
def interrupted(handler: Any) -> Iterator[None]:
    """Within, the handler is called now and then, each time some time after it has ended."""

    is_over = False

    def again(number: int, frame: FrameType | None) -> None:
        if not is_over:  # a signal that came before the end must not set the timer for the next handler
            handler()
            signal.setitimer(signal.ITIMER_REAL, EVERY_S)

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("regime", "workers"), [("headrace", 0), ("headrace", 2), ("torch", 0), ("torch", 2), ("economic", 2)]
)
def test_state_that_a_handler_takes_goes_on_where_the_trainer_was(regime: str, workers: int) -> None:
    taken: list[tuple[int, dict[str, object]]] = []
    epochs: list[list[list[int]]] = []
    with loader_of(regime, workers) as loader:

        def take() -> None:
            loader.stats()
            taken.append((sum(map(len, epochs)), loader.state_dict()))

        with interrupted(take):
            while len(taken) < 300:
                epochs.append([])
                for batch in loader:
                    epochs[-1].append(batch.tolist())
    came = [batch for epoch in epochs for batch in epoch]
    for had, state in taken[:: len(taken) // 5]:
        with loader_of(regime, workers) as again:
            again.load_state_dict(state)
            rest = next(iter(again), None)
        first = came[had : had + 2]  # it may have been interrupted as the next one was given
        assert rest is None or rest.tolist() in first or not first
