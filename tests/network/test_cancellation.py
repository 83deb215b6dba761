"""A read that is cancelled at any turn of the loop leaves nothing in use."""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine

import pytest

from headrace.fetch import Reader
from headrace.options import Fetch
from headrace.testing import FaultServer

BODY, GOOD = random.Random(1).randbytes(900_000), random.Random(2).randbytes(1000)
OPTIONS = Fetch(backoff_s=0.001)


class TurningLoop(asyncio.SelectorEventLoop):
    """Cancels a task at the so-manieth turn from now; turns that wait for the network count once."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._left = 0
        self._task: asyncio.Task[object] | None = None

    def cancel_after(self, turns: int, task: asyncio.Task[object]) -> None:
        self._left, self._task = turns, task

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._left -= 1
        if self._left == 0 and self._task is not None:
            self._task.cancel()


async def read(reader: Reader, url: str) -> bytes:
    return await reader.read(url)


async def read_part(reader: Reader, url: str) -> bytes:
    return await reader.read(url, 0, len(BODY))


async def fill(reader: Reader, url: str) -> bytes:
    target = bytearray(len(BODY))
    await reader.read_into(url, 0, memoryview(target))
    return bytes(target)


@pytest.mark.slow
@pytest.mark.parametrize("use", [read, read_part, fill])
@pytest.mark.parametrize(
    ("faults", "origins"),
    [
        ((), 1),
        (("reset_pre:times=1", "close_body:times=1,at=0.5", "slowdown:times=1"), 1),
        (("latency:ms=1", "short_chunked:times=1"), 1),
        (("redirect:mode=other",), 2),
    ],
    ids=["clean", "failing", "late", "redirected"],
)
def test_read_cancelled_at_any_turn_leaves_nothing_in_use(
    faults: tuple[str, ...], origins: int, use: Callable[[Reader, str], Coroutine[object, object, bytes]]
) -> None:
    with FaultServer({"good": GOOD}) as server, asyncio.Runner(loop_factory=TurningLoop) as runner:

        async def cancel_at_every_turn() -> int:
            async with Reader(OPTIONS, concurrency=1) as reader:
                for turns in range(1, 10_000):
                    url = server.add("body", BODY, *faults)
                    task = asyncio.ensure_future(use(reader, url))
                    loop.cancel_after(turns, task)
                    await asyncio.wait([task])
                    assert reader.meter.in_flight == 0
                    assert await reader.read(f"{server.url}/good") == GOOD
                    assert server.wait_until_no_connection(but=origins)
                    if not task.cancelled():
                        assert task.result() == BODY
                        return turns
            raise AssertionError("the read never came to its end")

        loop = runner.get_loop()
        assert isinstance(loop, TurningLoop)
        assert runner.run(cancel_at_every_turn()) > 5
        assert server.wait_until_no_connection()
