"""Ctrl-C is one KeyboardInterrupt in the trainer alone, and a handler may ask for the state at any moment."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from builders.numbers import Numbers
from process.waiting import descendants_of, is_running, trainer, wait_until

import headrace as hr

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

    def again(number: int, frame: FrameType | None) -> None:
        handler()
        signal.setitimer(signal.ITIMER_REAL, EVERY_S)

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S)
    try:
        yield
    finally:
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
