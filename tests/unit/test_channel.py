"""The channel between the engine and the trainer's side."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import headrace.delivery.channel
from headrace._util.wakeup import is_readable
from headrace.delivery.channel import ChannelFailedError, Receiver, Sender
from headrace.workers.failures import PackedError

DEADLINE_S = 20.0
FAILURE = PackedError(b"what went wrong")
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 5])


def open_channel(depth: int) -> tuple[Sender, Receiver]:
    return headrace.delivery.channel.open_channel(depth, lambda call, *args: call(*args))


def send_all(sender: Sender, messages: Iterable[object]) -> None:
    is_granted = threading.Event()
    sender.on_credit(is_granted.set)
    for message in messages:
        is_granted.clear()
        while not is_sent(sender, message):
            assert is_granted.wait(DEADLINE_S)
            is_granted.clear()
    sender.close()


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


def test_first_end_wins() -> None:
    sender, receiver = open_channel(2)
    sender.send("message")
    sender.close()
    sender.close()
    sender.fail(FAILURE)
    assert [receive(receiver) for _ in range(3)] == ["message", anyio.EndOfStream, anyio.EndOfStream]


EVENTS: list[tuple[Callable[[Sender, Receiver], object], object]] = [
    (lambda sender, _: sender.send("message"), "message"),
    (lambda sender, _: sender.close(), anyio.EndOfStream),
    (lambda sender, _: sender.fail(FAILURE), FAILURE),
    (lambda _, receiver: receiver.close(), anyio.ClosedResourceError),
]


@DEPTHS
@pytest.mark.parametrize(("act", "expected"), EVENTS, ids=["message", "end", "failure", "closed"])
def test_each_event_wakes_the_waiting_thread(act: Callable[..., object], expected: object, depth: int) -> None:
    sender, receiver = open_channel(depth)
    is_blocked = threading.Event()

    def wait() -> object:
        with pytest.raises(anyio.WouldBlock):
            receiver.receive_nowait()
        receiver.request()
        is_blocked.set()
        return receive(receiver)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        is_blocked.wait(DEADLINE_S)
        act(sender, receiver)
        assert waiting.result(DEADLINE_S) == expected


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


@DEPTHS
def test_many_and_large_messages_between_two_threads(depth: int) -> None:
    sender, receiver = open_channel(depth)
    messages = [random.Random(5).randbytes(3_000_000), *range(1000), anyio.EndOfStream]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_all, sender, messages[:-1])
        assert [receive(receiver) for _ in messages] == messages
        sending.result()


@pytest.mark.parametrize("depth", range(6))
def test_any_interleaving_keeps_order_count_and_grants(depth: int) -> None:
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
    fails = draws.random() < 0.5
    if fails:
        sender.fail(FAILURE)
    sender.close()
    left: list[object] = [{"number": number} for number in range(received, sent)] + [FAILURE] * fails
    for wanted in (*left, *[anyio.EndOfStream] * 3):
        assert is_readable(receiver.fileno(), 0), "it is there: nobody may wait for it"
        assert receive(receiver) == wanted, case
