"""Blocking calls in threads of our own: for files, and for file systems that know no other."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ObjectChangedError, ObjectMissingError
from headrace.fetch.stores.local import LocalStore, _File, answer_from
from headrace.fetch.threads import Threads
from headrace.types import Fills

LONG = bytes(range(256)) * 4096


@pytest.fixture
def threads() -> Any:
    threads = Threads("under-test", 2)
    yield threads
    threads.close()


def alive() -> int:
    return sum(thread.name == "under-test" for thread in threading.enumerate())


@pytest.mark.asyncio
async def test_results_and_errors_go_to_whoever_asked(threads: Threads) -> None:
    def divided(n: int) -> float:
        return 1 / n

    results = await asyncio.gather(*map(threads.call, [divided] * 5, (1, 2, 0, 4, 5)), return_exceptions=True)
    assert isinstance(results.pop(2), ZeroDivisionError)
    assert results == [1, 0.5, 0.25, 0.2]


@pytest.mark.asyncio
async def test_error_that_no_future_takes_is_told_all_the_same(threads: Threads) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(next, iter(()))


@pytest.mark.asyncio
async def test_threads_are_started_as_calls_need_them(threads: Threads) -> None:
    assert alive() == 0
    for _ in range(3):
        await threads.call(int)
    assert alive() == 1
    both = threading.Barrier(2)
    await asyncio.gather(*(threads.call(both.wait, 5) for _ in range(2)))
    await asyncio.gather(*(threads.call(int) for _ in range(10)))
    assert alive() == 2


@pytest.mark.asyncio
async def test_cancelled_call_is_not_begun(threads: Threads) -> None:
    blocked, done = threading.Event(), []
    first = [threads.call(blocked.wait, 5) for _ in range(2)]
    threads.call(done.append, 1).cancel()
    blocked.set()
    await asyncio.gather(*first, threads.call(done.append, 2))
    assert done == [2]


@pytest.mark.asyncio
async def test_closed_threads_take_no_calls(threads: Threads) -> None:
    await threads.call(int)
    threads.close()
    with pytest.raises(RuntimeError, match="under-test"):
        threads.call(int)


@pytest.mark.process
def test_stuck_call_does_not_hold_up_the_end_of_the_program() -> None:
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


@pytest.mark.asyncio
async def test_long_range_is_read_into_memory_in_any_pieces(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(LONG)
    store = LocalStore()
    for sizes in ([len(LONG)], [1, 300_000, 700_000, len(LONG)], [100]):
        answer = await store.get(str(tmp_path / "long"), 5, 1_000_005)
        body, got = answer.chunks, b""
        assert isinstance(body, Fills)
        for size in sizes:
            target = bytearray(size)
            got += target[: await body.read_into(memoryview(target))]
            assert body.received == len(got)
        assert got == LONG[5:1_000_005][: sum(sizes)]
    await store.aclose()


@pytest.mark.parametrize(("left", "error"), [(LONG[:10], ObjectChangedError), (None, ObjectMissingError)])
@pytest.mark.asyncio
async def test_file_that_changes_in_the_middle_is_noticed(
    left: bytes | None, error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "long").write_bytes(LONG)
    store = LocalStore()
    answer = await store.get(str(tmp_path / "long"))
    (tmp_path / "long").unlink() if left is None else (tmp_path / "long").write_bytes(left)
    with pytest.raises(error):
        await anext(answer.chunks)
    await store.aclose()


@pytest.mark.asyncio
async def test_file_that_comes_in_the_place_of_one_that_is_read_is_not_read_on_with(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(LONG)
    store = LocalStore()
    answer = await store.get(str(tmp_path / "long"))
    shutil.copy2(tmp_path / "long", tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "long")
    with pytest.raises(ObjectChangedError, match="another has come in its place"):
        await anext(answer.chunks)
    again = await store.get(str(tmp_path / "long"), 5, 10, if_match=answer.etag)
    assert await anext(again.chunks) == LONG[5:10]
    await store.aclose()


@pytest.mark.asyncio
async def test_cancelled_read_writes_no_more_into_the_readers_memory(tmp_path: Path, threads: Threads) -> None:
    (tmp_path / "long").write_bytes(LONG)
    stuck, go_on, visits = threading.Event(), threading.Event(), iter((False, True))
    file = _File(str(tmp_path / "long"))

    def opened(if_match: str | None) -> tuple[int, int, str]:
        if next(visits):
            stuck.set()
            go_on.wait(10)
        return file.open(if_match)

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
@pytest.mark.asyncio
async def test_what_is_no_file_is_refused_and_holds_up_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LONG)
    names = [f"fifo{n}" for n in range(20)]
    for name in names:
        os.mkfifo(tmp_path / name)
    store = LocalStore()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (*(str(tmp_path / name) for name in names), "/dev/null"):
            with pytest.raises(ObjectMissingError, match="a pipe, a socket or a device"):
                await store.get(path, 0, 10)
        with pytest.raises((ObjectMissingError, OSError)):
            await store.get(str(tmp_path / "socket"), 0, 10)
    answer = await store.get(str(tmp_path / "file"), 5, 10)
    assert await anext(answer.chunks) == LONG[5:10]
    await store.aclose()
