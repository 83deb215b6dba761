"""Unpacked frames are cached for the samples in them."""

from __future__ import annotations

import anyio
import pytest

from headrace.sources.bodies import Unpacked, unpacked_by

pytestmark = pytest.mark.anyio


class Unpacking:
    """Gives as many bytes as are asked for, once it may."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.calls, self.may = size, 0, anyio.Event()

    async def __call__(self) -> bytes:
        self.calls += 1
        await self.may.wait()
        return bytes(self.size)


async def test_concurrent_requests_unpack_a_frame_once() -> None:
    frames, unpack = Unpacked(), Unpacking()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(frames.get, "a", unpack)
        await anyio.wait_all_tasks_blocked()
        unpack.may.set()
    assert await frames.get("a", unpack) == bytes(10)
    assert unpack.calls == 1
    assert not frames._locks and not frames._asking


async def test_another_caller_unpacks_when_the_first_is_cancelled() -> None:
    frames, unpack, got = Unpacked(), Unpacking(), []
    scope = anyio.CancelScope()

    async def get(within: anyio.CancelScope) -> None:
        with within:
            got.append(await frames.get("a", unpack))

    async with anyio.create_task_group() as group:
        group.start_soon(get, scope)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(get, anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        unpack.may.set()
    assert got == [bytes(10)] and unpack.calls == 2
    assert not frames._locks and not frames._asking


async def test_error_is_not_cached() -> None:
    frames = Unpacked()

    async def broken() -> bytes:
        raise ValueError("no")

    async def nothing() -> None:
        return None

    with pytest.raises(ValueError, match="no"):
        await frames.get("a", broken)
    assert await frames.get("a", nothing) is None
    unpack = Unpacking(3)
    unpack.may.set()
    assert await frames.get("a", unpack) == bytes(3)


async def test_most_recent_frames_are_kept_within_four_mebibytes() -> None:
    frames, sizes = Unpacked(), {"a": 2**21, "b": 2**20, "c": 2**21, "huge": 2**22 + 1}
    unpack = {name: Unpacking(size) for name, size in sizes.items()}
    for each in unpack.values():
        each.may.set()
    for name in ("a", "b", "a", "c", "a", "huge", "a", "huge", "c"):  # "c" takes the place of "b"
        assert len(await frames.get(name, unpack[name]) or b"") == sizes[name]
        assert frames._nbytes == sum(map(len, frames._kept.values())) <= 2**22
    assert {name: each.calls for name, each in unpack.items()} == {"a": 1, "b": 1, "c": 1, "huge": 2}
    assert list(frames._kept) == ["a", "c"]
    await frames.get("b", unpack["b"])
    assert unpack["b"].calls == 2
    frames.drop("c")
    frames.drop("never there")
    assert frames._nbytes == sum(map(len, frames._kept.values()))


async def test_each_reader_has_its_own_cache() -> None:
    a, b = Unpacking(), Unpacking()
    assert unpacked_by(a) is unpacked_by(a)  # type: ignore[arg-type]
    assert unpacked_by(a) is not unpacked_by(b)  # type: ignore[arg-type]
