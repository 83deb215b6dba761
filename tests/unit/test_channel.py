"""The event loop of a loader, and the channels and sockets between threads and processes."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest

import headrace as hr
import headrace.delivery.channel
from headrace._util.wakeup import Wakeup, is_readable, is_ready
from headrace.delivery.channel import ChannelFailedError, Receiver, Sender
from headrace.engine.scheduler import event_loop as engine
from headrace.engine.scheduler.event_loop import Engine, EngineState, Mailbox
from headrace.errors import LoaderClosedError
from headrace.observe import LoaderMeters
from headrace.workers.failures import PackedError
from headrace.workers.forkserver.fd_socket import JSON, PICKLE, BlockingWire, Codec, PolledWire, encode

DEADLINE_S = 20.0
FAILURE = PackedError(b"what went wrong")
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 5])


def open_channel(depth: int) -> tuple[Sender, Receiver]:
    return headrace.delivery.channel.open_channel(depth, lambda call, *args: call(*args))


def is_sent(sender: Sender, message: object) -> bool:
    try:
        sender.send(message)
    except anyio.WouldBlock:
        return False
    return True


def receive(receiver: Receiver, *, asks: bool = True) -> object:
    """The next message, or the failure or the type of the error in its place."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return receiver.receive_nowait()
        except anyio.WouldBlock:
            if asks:
                receiver.request()
            assert is_readable(receiver.fileno(), deadline - time.monotonic()), "nothing came"
        except ChannelFailedError as error:
            return error.failure
        except (anyio.EndOfStream, anyio.ClosedResourceError) as error:
            return type(error)


@DEPTHS
def test_close_wakes_threads_that_wait(depth: int) -> None:
    _, receiver = open_channel(depth)
    with pytest.raises(anyio.WouldBlock):
        receiver.receive_nowait()
    assert not is_readable(receiver.fileno(), 0)
    receiver.close()
    assert is_readable(receiver.fileno(), 0)


@DEPTHS
def test_messages_after_close_return_to_the_sender(depth: int) -> None:
    count = max(depth, 1)
    for received in range(count + 1):
        sender, receiver = open_channel(depth)
        receiver.request()
        for number in range(count):
            sender.send(number)
        for number in range(received):
            assert receive(receiver) == number
        assert not sender.take_back(), "messages were taken back while the receiver may still take them"
        assert list(receiver.close()) == list(range(received, count))
        late = is_sent(sender, "late")
        for _ in range(2):
            assert receive(receiver) == anyio.ClosedResourceError
            sender.close()
        assert list(sender.take_back()) == ["late"] * late
        assert not sender.take_back(), "they were returned twice"


@pytest.mark.parametrize("depth", range(6))
def test_any_interleaving_keeps_order_count_grants_and_the_first_end(depth: int) -> None:
    for seed in range(10):
        draws = random.Random(f"{depth}/{seed}")
        _interleave(*open_channel(depth), draws, draws.randrange(80) if seed else 0, f"seed {seed}")


def _interleave(sender: Sender, receiver: Receiver, draws: random.Random, steps: int, case: str) -> None:
    """Random steps on both ends, against a model of two numbers."""
    depth, sent, received, granted = sender.depth, 0, 0, sender.depth
    for _ in range(steps):
        step = draws.choice(("send", "send", "receive", "receive", "request"))
        if step == "request":
            receiver.request()
            granted = granted if depth else max(granted, received + 1)
        elif step == "send":
            assert is_sent(sender, {"number": sent}) is (sent < granted), case
            sent = min(sent + 1, granted)
        elif received < sent:
            assert receive(receiver, asks=False) == {"number": received}, case
            received += 1
            granted += 1 if depth else 0
        else:
            with pytest.raises(anyio.WouldBlock):
                receiver.receive_nowait()
        assert sender.granted == granted, case
    fail = partial(sender.fail, FAILURE)
    ends = draws.sample([fail, sender.close, sender.close], 3)
    for end in ends:
        end()
    left: list[object] = [{"number": number} for number in range(received, sent)] + [FAILURE] * (ends[0] is fail)
    for wanted in (*left, *[anyio.EndOfStream] * 3):
        assert is_readable(receiver.fileno(), 0), "it is there: nobody may wait for it"
        assert receive(receiver) == wanted, case


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


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture(params=[PICKLE, JSON], ids=["pickle", "json"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


@pytest.mark.parametrize("size", [10, 100_000])
def test_polled_wire_delivers_all_in_order_when_the_socket_is_full(pair: Pair, codec: Codec, size: int) -> None:
    with closing(PolledWire(pair[0], codec)) as sender, closing(PolledWire(pair[1], codec)) as receiver:
        sent, was_all = [], True
        while was_all or len(sent) < 50:
            fd = os.memfd_create("sent")
            sent.append(identity(fd))
            was_all = sender.send([len(sent) - 1, "x" * size], [fd])
            os.close(fd)  # which must not matter to what waits
        got = []
        while len(got) < len(sent):
            sender.flush()
            if is_ready(receiver.fileno(), 10):
                for number, text in receiver.receive():
                    assert (number, len(text)) == (len(got), size)
                    fd = receiver.take_descriptor()
                    assert not os.get_inheritable(fd)
                    got.append(identity(fd))
                    os.close(fd)
        assert got == sent


def test_polled_wire_leaves_no_descriptor_when_the_other_end_is_gone(pair: Pair) -> None:
    with closing(PolledWire(pair[0])) as sender, Path(os.devnull).open() as file:
        before = len(os.listdir("/proc/self/fd"))
        while sender.send("x" * 10_000, [file.fileno()]):
            pass
        sender.send("behind", [file.fileno()])
        pair[1].close()
        assert sender.flush()
        assert len(os.listdir("/proc/self/fd")) == before - 1  # the other end


@pytest.mark.parametrize("count", range(1, 12))
def test_wires_end_when_the_other_end_closes_inside_a_message(codec: Codec, count: int) -> None:
    for make in (lambda sock: PolledWire(sock, codec), BlockingWire):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                theirs.sendall(encode({"a": 1}, codec)[:count])
            wire = make(ours)
            with pytest.raises(EOFError):
                wire.receive()
