"""Blocking calls in own threads, and reads of local files by them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import ObjectChangedError, ObjectMissingError
from headrace.fetch.stores.local import LocalStore, _File, answer_from
from headrace.fetch.threads import Threads
from headrace.types import Fills

LONG = bytes(range(256)) * 4096


on_a_loop = pytest.mark.asyncio


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("under-test", 2)
    yield threads
    threads.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "long"
    path.write_bytes(LONG)
    return path


def alive() -> int:
    return sum(thread.name == "under-test" for thread in threading.enumerate())


@on_a_loop
async def test_results_and_errors_go_to_the_callers(threads: Threads) -> None:
    results = await asyncio.gather(*(threads.call(divmod, 6, n) for n in (1, 2, 0, 4)), return_exceptions=True)
    assert isinstance(results.pop(2), ZeroDivisionError)
    assert results == [(6, 0), (3, 0), (1, 2)]
    with pytest.raises(RuntimeError, match="StopIteration"):  # which no future takes
        await threads.call(next, iter(()))


@on_a_loop
async def test_threads_are_started_as_calls_need_them(threads: Threads) -> None:
    assert alive() == 0
    for _ in range(3):
        await threads.call(int)
    assert alive() == 1
    both = threading.Barrier(2)
    await asyncio.gather(*(threads.call(both.wait, 5) for _ in range(2)))
    await asyncio.gather(*(threads.call(int) for _ in range(10)))
    assert alive() == 2


@on_a_loop
async def test_cancelled_calls_and_calls_of_closed_threads_do_not_run(threads: Threads) -> None:
    blocked, done = threading.Event(), []
    first = [threads.call(blocked.wait, 5) for _ in range(2)]
    threads.call(done.append, 1).cancel()
    blocked.set()
    await asyncio.gather(*first, threads.call(done.append, 2))
    assert done == [2]
    threads.close()
    with pytest.raises(RuntimeError, match="under-test"):
        threads.call(int)


@pytest.mark.process
def test_blocked_call_does_not_delay_program_exit() -> None:
    code = """
import asyncio, threading
from headrace.fetch.threads import Threads
async def main():
    threads = Threads("stuck", 1)
    call = threads.call(threading.Event().wait)
    await asyncio.sleep(0)
    threads.close()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@on_a_loop
async def test_long_range_is_read_in_pieces_of_any_size(file: Path) -> None:
    store = LocalStore()
    for sizes in ([len(LONG)], [1, 300_000, 700_000, len(LONG)], [100]):
        answer = await store.get(str(file), 5, 1_000_005)
        body, got = answer.chunks, b""
        assert isinstance(body, Fills)
        for size in sizes:
            target = bytearray(size)
            got += target[: await body.read_into(memoryview(target))]
            assert body.received == len(got)
        assert got == LONG[5:1_000_005][: sum(sizes)]
    await store.aclose()


def shorten(file: Path) -> None:
    file.write_bytes(LONG[:10])


def replace(file: Path) -> None:
    other = file.with_name("other")
    shutil.copy2(file, other)
    other.replace(file)


@pytest.mark.parametrize(("change", "error", "why"), [
    (shorten, ObjectChangedError, None),
    (Path.unlink, ObjectMissingError, None),
    (replace, ObjectChangedError, "another has come in its place"),
])  # fmt: skip
@on_a_loop
async def test_file_that_changes_during_a_read_is_an_error(
    change: Callable[[Path], None], error: type[Exception], why: str | None, file: Path
) -> None:
    store = LocalStore()
    answer = await store.get(str(file))
    change(file)
    with pytest.raises(error, match=why):
        await anext(answer.chunks)
    if change is replace:
        again = await store.get(str(file), 5, 10, if_match=answer.etag)
        assert await anext(again.chunks) == LONG[5:10]
    await store.aclose()


@on_a_loop
async def test_cancelled_read_writes_no_more_into_the_readers_memory(file: Path, threads: Threads) -> None:
    stuck, go_on, visits = threading.Event(), threading.Event(), iter((False, True))

    def opened(if_match: str | None) -> tuple[int, int, str]:
        if next(visits):
            stuck.set()
            go_on.wait(10)
        return local.open(if_match)

    local = _File(str(file))
    answer = await answer_from(threads, opened, None, None, None)
    assert isinstance(answer.chunks, Fills)
    target = bytearray(len(LONG))
    read = asyncio.ensure_future(answer.chunks.read_into(memoryview(target)))
    await asyncio.to_thread(stuck.wait, 10)
    read.cancel()
    await asyncio.wait([read])
    assert read.cancelled()
    go_on.set()
    both = threading.Barrier(2)  # both threads are free again
    await asyncio.gather(*(threads.call(both.wait, 10) for _ in range(2)))
    assert not any(target)


@pytest.mark.process
@on_a_loop
async def test_pipe_socket_and_device_are_refused_and_block_no_thread(tmp_path: Path, file: Path) -> None:
    pipes = [str(tmp_path / f"fifo{n}") for n in range(20)]
    for pipe in pipes:
        os.mkfifo(pipe)
    store = LocalStore()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (*pipes, "/dev/null"):
            with pytest.raises(ObjectMissingError, match="a pipe, a socket or a device"):
                await store.get(path, 0, 10)
        with pytest.raises((ObjectMissingError, OSError)):
            await store.get(str(tmp_path / "socket"), 0, 10)
    answer = await store.get(str(file), 5, 10)
    assert await anext(answer.chunks) == LONG[5:10]
    await store.aclose()
