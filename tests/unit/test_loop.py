"""The event loop of a loader, its engine, its mailbox, and the descriptor that wakes others."""

from __future__ import annotations

import asyncio
import sys
import threading
from functools import partial

import pytest

import headrace as hr
from headrace._util.wakeup import Wakeup, is_readable
from headrace.engine.scheduler import event_loop as engine
from headrace.engine.scheduler.event_loop import Engine, EngineState, Mailbox
from headrace.errors import LoaderClosedError
from headrace.observe import LoaderMeters


async def raises(kind: type[BaseException], number: int) -> None:
    await asyncio.sleep(0)
    raise kind(number)


@pytest.mark.parametrize("has_uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_exits_of_tasks_and_callbacks_do_not_end_the_loop(
    has_uvloop: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if has_uvloop:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setattr(engine.importlib.util, "find_spec", lambda _: None)
    kinds = [SystemExit, ValueError, KeyboardInterrupt, SystemExit]
    got: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert type(loop).__mro__[2].__module__.startswith("uvloop" if has_uvloop else "asyncio")
        for round_ in range(3):
            tasks = [loop.create_task(raises(kind, number)) for number, kind in enumerate(kinds)]
            loop.call_soon(sys.exit, round_)
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, BaseException)
                got.append(error)

    engine.run(main)
    assert [type(error) for error in got] == 3 * kinds
    assert "SystemExit" in caplog.text


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exit_of_the_main_task_is_a_runtime_error(kind: type[BaseException]) -> None:
    with pytest.raises(RuntimeError, match=kind.__name__) as caught:
        engine.run(raises, kind, 1)
    assert isinstance(caught.value.__cause__, kind)


def test_engine_calls_in_order_and_refuses_after_close() -> None:
    order: list[str] = []
    has_begun, is_cancelled = threading.Event(), threading.Event()

    async def note(what: str) -> None:
        order.append(what)

    async def runs() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            order.append("cancelled")
            is_cancelled.set()
            raise

    engine = Engine(partial(note, "opened"), partial(note, "closing"), partial(order.append, "closed"))
    engine.start(runs, partial(order.append, "refused"))
    assert has_begun.wait()
    for number in range(3):
        engine.mailbox.post(order.append, str(number))
    engine.close()
    assert engine.state is EngineState.CLOSED
    assert order == ["opened", "0", "1", "2", "cancelled", "closing", "closed"]
    engine.start(runs, partial(order.append, "refused"))
    assert order[-1] == "refused"


def test_engine_ends_when_its_runtime_was_closed_while_it_started() -> None:
    class ClosingMeters(LoaderMeters):
        def begin(self) -> None:  # right before the engine starts
            closing = threading.Thread(target=runtime.close)
            closing.start()
            closing.join()

    with hr.DataLoader(hr.from_map([1])) as loader:
        runtime = loader._behind._runtime
        runtime.meters = ClosingMeters()
        with pytest.raises(LoaderClosedError, match="closed"):
            runtime.post(print)
    assert "headrace-engine" not in [thread.name for thread in threading.enumerate()]


def test_mailbox_is_readable_after_post_and_serves_earlier_puts() -> None:
    mailbox, made = Mailbox(), list[int]()
    mailbox.put(made.append, 1)
    assert not is_readable(mailbox.fileno(), 0)
    mailbox.post(made.append, 2)
    mailbox.post(made.append, 3)
    assert is_readable(mailbox.fileno(), 0)
    mailbox.serve()
    assert made == [1, 2, 3]
    assert not is_readable(mailbox.fileno(), 0)


def test_mailbox_loses_no_call_posted_while_it_serves() -> None:
    mailbox, made, count = Mailbox(), list[int](), 3000
    threads = [threading.Thread(target=lambda: [mailbox.post(made.append, k) for k in range(count)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(made) < 3 * count and is_readable(mailbox.fileno(), 10):
        mailbox.serve()
    for thread in threads:
        thread.join()
    assert len(made) == 3 * count


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 4096, 200_000])
def test_wakeup_is_readable_until_it_is_cleared_however_often_it_was_set(times: int) -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup.fileno(), 0)
    for _ in range(2):
        for _ in range(times):
            wakeup.set()
        assert wakeup.wait(0)
        wakeup.clear()
        wakeup.clear()
        assert not wakeup.wait(0)
