"""Ctrl-C: one KeyboardInterrupt in the trainer, and silence from everybody else."""

from __future__ import annotations

import os
import signal

import pytest
from process.waiting import descendants_of, is_running, trainer, wait_until

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
