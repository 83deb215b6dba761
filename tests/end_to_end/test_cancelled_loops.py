"""`async for` that is cancelled again and again leaves no descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading

import pytest
from builders.numbers import Made

import headrace as hr


@pytest.mark.slow
def test_cancelled_loops_leave_no_descriptors_when_no_garbage_is_collected() -> None:
    asked = threading.Event()

    async def never(index: int) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def loop() -> None:
        async for _ in loader:
            pass

    async def descriptors_after(times: int) -> int:
        for _ in range(times):
            asked.clear()
            task = asyncio.create_task(loop())
            await asyncio.to_thread(asked.wait)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return len(os.listdir("/proc/self/fd"))

    async def main() -> tuple[int, int]:
        return await descriptors_after(3), await descriptors_after(40)

    with hr.DataLoader(Made(never, 1000), batch_size=4) as loader:
        gc.collect()
        gc.disable()
        try:
            before, after = asyncio.run(main())
        finally:
            gc.enable()
        assert after <= before + 4  # of loops that are ending
