"""What `async for` leaves behind where it is cancelled again and again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading

import pytest

import headrace as hr


class Slow(hr.AsyncDataset):
    """Samples that never come; what waits for them holds all that it can."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __len__(self) -> int:
        return 1000

    async def aget(self, index: int) -> int:
        self.asked.set()
        await asyncio.Event().wait()
        return index


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_cancelled_loops_leave_no_descriptors_when_no_garbage_is_collected() -> None:
    async def main() -> tuple[int, int]:
        async def loop() -> None:
            async for _ in loader:
                pass

        async def cancel(times: int) -> None:
            for _ in range(times):
                data.asked.clear()
                task = asyncio.create_task(loop())
                await asyncio.to_thread(data.asked.wait)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        await cancel(3)
        before = descriptors()
        await cancel(40)
        return before, descriptors()

    data = Slow()
    with hr.DataLoader(data, batch_size=4) as loader:
        gc.collect()
        gc.disable()
        try:
            before, after = asyncio.run(main())
        finally:
            gc.enable()
        assert after <= before + 4  # of those that are ending
