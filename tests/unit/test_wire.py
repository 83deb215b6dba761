"""Messages with descriptors over sockets: whole and in order, whatever the socket takes at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace._util.wakeup import is_ready
from headrace.workers.forkserver.fd_socket import JSON, PICKLE, BlockingWire, Codec, PolledWire, encode

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
