"""Both channels of ours keep the contract of channels, also when the sender really is in another process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from contract.remote_sender import RemoteSender

from headrace.deliver.channel import ThreadReceiver, ThreadSender, process_channel, thread_channel
from headrace.protocols import Receiver, Sender
from headrace.testing import ChannelContract
from headrace.wakeup import is_readable


class TestThreadChannel(ChannelContract):
    def open_channel(self, depth: int) -> tuple[ThreadSender, ThreadReceiver]:
        return thread_channel(depth, lambda call, *args: call(*args))


class TestProcessChannel(ChannelContract):
    interleavings = 12  # each starts a process

    @pytest.fixture(autouse=True)
    def ended(self) -> Iterator[None]:
        self.senders: list[RemoteSender] = []
        yield
        for sender in self.senders:
            sender.end()

    def open_channel(self, depth: int) -> tuple[Any, Any]:
        self.senders.append(RemoteSender(depth))
        return self.senders[-1], self.senders[-1].receiver

    @pytest.mark.parametrize("depth", [0, 1, 4])
    def test_sender_that_is_killed_breaks_the_channel_after_its_messages(self, depth: int) -> None:
        sender, receiver = self.open_channel(depth)
        receiver.request()
        for number in range(max(depth, 1)):
            sender.send(number)
        sender.kill()
        assert [receiver.receive_nowait() for _ in range(max(depth, 1))] == list(range(max(depth, 1)))
        for _ in range(2):
            assert is_readable(receiver.fileno(), 5)
            with pytest.raises(anyio.BrokenResourceError):
                receiver.receive_nowait()
        receiver.request()  # grants to nobody
        receiver.close()
        with pytest.raises(anyio.ClosedResourceError):
            receiver.receive_nowait()

    def test_sender_that_is_killed_wakes_who_waits(self) -> None:
        sender, receiver = self.open_channel(2)
        raised: list[type[Exception]] = []

        def wait() -> None:
            is_readable(receiver.fileno(), 10)
            try:
                receiver.receive_nowait()
            except Exception as error:
                raised.append(type(error))

        assert sender.granted == 2  # it is up
        thread = threading.Thread(target=wait)
        thread.start()
        sender.kill()
        thread.join()
        assert raised == [anyio.BrokenResourceError]

    @pytest.mark.parametrize("depth", [1, 3])
    def test_sender_goes_on_by_itself_as_it_is_granted(self, depth: int) -> None:
        sender, receiver = self.open_channel(depth)
        sender.send_by_itself(5000)
        got: list[int] = []
        while True:
            try:
                got.append(receiver.receive_nowait())
            except anyio.WouldBlock:
                assert is_readable(receiver.fileno(), 10)
            except anyio.EndOfStream:
                break
        assert got == list(range(5000))


def test_ends_of_a_process_channel_keep_the_protocols() -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender: Sender = process_channel(ours, 1, sends=True)  # type: ignore[assignment]
        receiver: Receiver = process_channel(theirs, 1, sends=False)  # type: ignore[assignment]
        for name in ("send", "fail", "close", "on_credit", "take_back", "granted", "depth"):
            assert hasattr(sender, name), name
        for name in ("receive_nowait", "request", "fileno", "close"):
            assert hasattr(receiver, name), name
