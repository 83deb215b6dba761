"""`pipe:` addresses: what commands write is read as an object, and no command outlives its readers."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.errors import OptionError, StorageError
from headrace.fetch import Reader
from headrace.fetch.stores.pipe import PipeStore
from headrace.options import Fetch

pytestmark = pytest.mark.asyncio

ONCE = Fetch(allow_pipe=True, attempts=1)


async def test_ranges_of_one_output_need_one_run(tmp_path: Path) -> None:
    url = f"pipe:echo run >> {tmp_path}/runs; seq 100000"
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    async with Reader(ONCE, concurrency=8) as reader:
        parts = await asyncio.gather(*(reader.read(url, n, n + 70000) for n in range(0, len(whole), 70000)))
        assert b"".join(parts) == whole
        assert await reader.read(url) == whole
    assert (tmp_path / "runs").read_text() == "run\n"


async def test_output_that_was_forgotten_is_made_again_and_is_the_same_version() -> None:
    async with Reader(ONCE, concurrency=4) as reader:
        target = memoryview(bytearray(4))
        span = await reader.read_into("pipe:echo 1234567", 0, target)
        for n in range(20):
            assert await reader.read(f"pipe:echo {n}") == b"%d\n" % n
        await reader.read_into("pipe:echo 1234567", 4, target, etag=span.etag)
        assert bytes(target) == b"567\n"


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("echo half; echo one >&2; echo 'no more' >&2; exit 3", StorageError, "exit status 3: one; no more"),
        ("kill -9 $$", StorageError, "signal SIGKILL"),
        ("no-such-command-anywhere", StorageError, "exit status 127"),
        ("seq 200000 >&2; seq 200000; echo last >&2; exit 1", StorageError, r"199999; 200000; last"),
        (" ", OptionError, "no command"),
    ],
)
async def test_failed_command_is_an_error_that_says_why(command: str, error: type[Exception], said: str) -> None:
    async with Reader(ONCE, concurrency=1) as reader:
        with pytest.raises(error, match=said) as caught:
            await reader.read(f"pipe:{command}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("by", ["cancel", "aclose"])
async def test_command_and_its_children_are_killed(by: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    store = PipeStore()
    read = asyncio.ensure_future(store.get(f"exec 3> {fifo}; sleep 1000 & echo up >&3; sleep 1000"))
    # Shell and children hold the FIFO open: its end comes when the last of them has gone.
    with await asyncio.to_thread(fifo.open, "rb") as held:
        assert await asyncio.to_thread(held.readline) == b"up\n"
        read.cancel() if by == "cancel" else await store.aclose()
        assert await asyncio.to_thread(held.read) == b""
    with suppress(StorageError, asyncio.CancelledError):
        await read
    await store.aclose()


async def test_command_that_another_still_waits_for_goes_on(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    store = PipeStore()
    reads = [asyncio.ensure_future(store.get(f"cat {fifo}")) for _ in range(2)]
    await asyncio.sleep(0)
    reads[0].cancel()
    await asyncio.wait(reads[:1])
    await asyncio.to_thread(fifo.write_bytes, b"abc")
    assert b"".join([bytes(piece) async for piece in (await reads[1]).chunks]) == b"abc"
    await store.aclose()


_TRAINER = """
import asyncio, sys
from headrace.fetch.stores.pipe import PipeStore

asyncio.run(PipeStore().get(sys.argv[1]))
"""


async def test_command_and_its_children_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = f"exec 3> {fifo}; sleep 1000 & echo up >&3; sleep 1000"
    trainer = await asyncio.create_subprocess_exec(sys.executable, "-c", _TRAINER, command)
    with await asyncio.to_thread(fifo.open, "rb") as held:
        assert await asyncio.to_thread(held.readline) == b"up\n"
        trainer.kill()
        await trainer.wait()
        assert await asyncio.to_thread(held.read) == b""
