"""The channel between the engine and the trainer's side."""

from __future__ import annotations

import asyncio
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


def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true. The other end may see a change later."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.0005)


def wait_until_granted(sender: Sender, count: int) -> None:
    eventually(lambda: sender.granted >= count)
    assert sender.granted == count


def is_sent(sender: Sender, message: object) -> bool:
    try:
        sender.send(message)
    except anyio.WouldBlock:
        return False
    return True


def send(sender: Sender, message: object) -> None:
    eventually(lambda: is_sent(sender, message))


def send_all(sender: Sender, messages: Iterable[object]) -> None:
    for message in messages:
        send(sender, message)
    sender.close()


def would_block(receiver: Receiver) -> bool:
    try:
        receiver.receive_nowait()
    except anyio.WouldBlock:
        return True
    return False


def receive(receiver: Receiver, *, asks: bool = True) -> object:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return receiver.receive_nowait()
        except anyio.WouldBlock:
            if asks:
                receiver.request()
            assert is_readable(receiver.fileno(), deadline - time.monotonic()), "nothing came"


def receive_all(receiver: Receiver) -> list[object]:
    got = []
    while True:
        try:
            got.append(receive(receiver))
        except anyio.EndOfStream:
            return got


def ending_of(receiver: Receiver) -> Exception:
    try:
        message = receive(receiver)
    except Exception as error:
        return error
    raise AssertionError(f"{message!r} came, where nothing more may come")


def receive_while(receiver: Receiver, act: Callable[[], object]) -> object:
    """Receive in a thread that waits before `act` is called. Returns the message, or the type of the error."""
    is_blocked = threading.Event()

    def wait() -> object:
        assert would_block(receiver)
        is_blocked.set()
        try:
            return receive(receiver)
        except Exception as error:
            return type(error)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        is_blocked.wait(DEADLINE_S)
        act()
        return waiting.result(DEADLINE_S)


def take_back(sender: Sender, left: list[object], count: int) -> None:
    """Add what the receiver did not take to `left`, until it has `count` messages."""
    eventually(lambda: left.extend(sender.take_back()) or len(left) >= count)


DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 5])


def open_channel(depth: int) -> tuple[Sender, Receiver]:
    return headrace.delivery.channel.open_channel(depth, lambda call, *args: call(*args))


@DEPTHS
def test_sender_is_called_when_more_is_granted(depth: int) -> None:
    sender, receiver = open_channel(depth)
    calls: list[int] = []
    sender.on_credit(lambda: calls.append(1))
    for number in range(3):
        seen = len(calls)
        receiver.request()
        send(sender, number)
        assert receive(receiver) == number
        if depth == 0:
            receiver.request()
        wait_until_granted(sender, max(depth, 1) + number + 1)
        eventually(lambda seen=seen: len(calls) > seen)  # type: ignore[misc]


def test_first_end_wins() -> None:
    sender, receiver = open_channel(2)
    sender.send("message")
    sender.close()
    sender.close()
    sender.fail(PackedError(b"too late"))
    assert receive_all(receiver) == ["message"]
    assert type(ending_of(receiver)) is anyio.EndOfStream


ENDS: dict[type[Exception], Callable[[Sender, Receiver], object]] = {
    anyio.EndOfStream: lambda sender, _: sender.close(),
    ChannelFailedError: lambda sender, _: sender.fail(PackedError(b"failed")),
    anyio.ClosedResourceError: lambda _, receiver: receiver.close(),
}


@pytest.mark.parametrize("expected", ENDS)
def test_close_and_failure_wake_a_waiting_receiver(expected: type[Exception]) -> None:
    sender, receiver = open_channel(1)
    assert receive_while(receiver, lambda: ENDS[expected](sender, receiver)) is expected


@DEPTHS
def test_message_wakes_a_waiting_thread(depth: int) -> None:
    sender, receiver = open_channel(depth)
    receiver.request()
    assert receive_while(receiver, lambda: send(sender, "come")) == "come"


@DEPTHS
def test_message_wakes_a_waiting_task(depth: int) -> None:
    async def wait_and_receive(sender: Sender, receiver: Receiver) -> list[object]:
        got: list[object] = []
        sending = asyncio.ensure_future(asyncio.to_thread(send_all, sender, range(20)))
        while True:
            try:
                got.append(receiver.receive_nowait())
            except anyio.WouldBlock:
                receiver.request()
                with anyio.fail_after(DEADLINE_S):
                    await anyio.wait_readable(receiver.fileno())
            except anyio.EndOfStream:
                await sending
                return got

    assert asyncio.run(wait_and_receive(*open_channel(depth))) == list(range(20))


@DEPTHS
def test_closed_receiver_gets_nothing_more(depth: int) -> None:
    sender, receiver = open_channel(depth)
    receiver.request()
    send(sender, "late")
    receiver.close()
    for _ in range(2):
        assert type(ending_of(receiver)) is anyio.ClosedResourceError
    sender.close()
    assert type(ending_of(receiver)) is anyio.ClosedResourceError


@DEPTHS
def test_sender_gets_back_what_a_closed_receiver_did_not_take(depth: int) -> None:
    for received in range(max(depth, 1) + 1):
        sender, receiver = open_channel(depth)
        receiver.request()
        count = max(depth, 1)
        for number in range(count):
            send(sender, number)
        for _ in range(received):
            receive(receiver)
        assert not sender.take_back(), "messages were taken back while the receiver may still take them"
        left = list(receiver.close())
        sender.close()
        take_back(sender, left, count - received)
        assert left == list(range(received, count)), f"{received} received"
        assert not sender.take_back(), "they were returned twice"


@DEPTHS
def test_many_and_large_messages_between_two_threads(depth: int) -> None:
    sender, receiver = open_channel(depth)
    messages = [random.Random(5).randbytes(3_000_000), *range(1000)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_all, sender, messages)
        assert receive_all(receiver) == messages
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
            if not depth:
                granted = max(granted, received + 1)
        elif step == "send" and sent < granted:
            send(sender, {"number": sent})
            sent += 1
        elif step == "send":
            assert not is_sent(sender, "too many"), case
        elif received < sent:
            assert receive(receiver, asks=False) == {"number": received}, case
            received += 1
            granted += 1 if depth else 0
        else:
            assert would_block(receiver), case
        wait_until_granted(sender, granted)
    fails = draws.random() < 0.5
    if fails:
        sender.fail(PackedError(b"what went wrong"))
    sender.close()
    for number in range(received, sent):
        assert receive(receiver) == {"number": number}, case
    if fails:
        error = ending_of(receiver)
        assert isinstance(error, ChannelFailedError), case
        assert error.failure == PackedError(b"what went wrong"), case
    for _ in range(3):
        assert is_readable(receiver.fileno(), 0), "the end is there: nobody may wait for it"
        assert type(ending_of(receiver)) is anyio.EndOfStream, case
