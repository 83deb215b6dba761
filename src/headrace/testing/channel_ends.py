"""The two ends of a channel in a test: each step waits until the other end has done its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import anyio

from headrace.deliver.channel import ChannelFailedError
from headrace.failures import PackedError
from headrace.protocols import Receiver, Sender
from headrace.wakeup import is_readable

DEADLINE_S = 20.0


def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true: what one end does may take a while to be seen at the other."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.0005)


def wait_until_granted(sender: Sender, count: int) -> None:
    eventually(lambda: sender.granted >= count)
    assert sender.granted == count


def send(sender: Sender, message: object) -> None:
    """Send what is granted, or is about to be."""

    def is_sent() -> bool:
        try:
            sender.send(message)
        except anyio.WouldBlock:
            return False
        return True

    eventually(is_sent)


def send_all(sender: Sender, messages: Sequence[object]) -> None:
    for message in messages:
        send(sender, message)
    sender.close()


def is_refused(sender: Sender) -> bool:
    try:
        sender.send("too many")
    except anyio.WouldBlock:
        return True
    return False


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


def receive_some(receiver: Receiver, count: int) -> list[object]:
    return [receive(receiver) for _ in range(count)]


def ending_of(receiver: Receiver) -> type[BaseException]:
    try:
        message = receive(receiver)
    except Exception as error:
        return type(error)
    raise AssertionError(f"{message!r} came, where nothing more may come")


def failure_of(receiver: Receiver) -> PackedError:
    try:
        message = receive(receiver)
    except ChannelFailedError as error:
        return error.failure
    raise AssertionError(f"{message!r} came in the place of a failure")


def receive_while(receiver: Receiver, act: Callable[[], object]) -> object:
    """What `receiver` gives, or the type of what it raises, in a thread that waited before `act` was called."""
    results: list[object] = []
    is_blocked = threading.Event()

    def wait() -> None:
        assert would_block(receiver)
        is_blocked.set()
        try:
            results.append(receive(receiver))
        except Exception as error:
            results.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    is_blocked.wait(DEADLINE_S)
    act()
    waiting.join(DEADLINE_S)
    assert results, "the thread still waits"
    return results[0]


def take_back(sender: Sender, left: list[object], count: int) -> None:
    """Add to `left` what the sender knows was not received, until it has `count` messages."""

    def is_complete() -> bool:
        left.extend(sender.take_back())
        return len(left) >= count

    eventually(is_complete)
