"""The time limits of a read: which one ends it, when, and that nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from simulation.loop import simulate

from headrace.fetch.range_request import DeadlineTimer, Watched
from headrace.options import Fetch

OPTIONS = Fetch(
    first_byte_timeout_s=10.0, stall_timeout_s=5.0, total_timeout_s=100.0, min_rate_bytes_s=1000, hedge_share=0.0
)


class Read(Watched):
    def time_s(self, options: Fetch) -> float:
        return options.total_timeout_s


async def watched(steps: Callable[[Read], list[tuple[float, int]]]) -> tuple[str | None, float]:
    """Wait and receive bytes in steps. Returns the limit that ended the read, and the time."""
    loop = asyncio.get_running_loop()
    watch, read = DeadlineTimer(OPTIONS, loop.time), Read(0)
    read.start_now(loop.time())
    watch.begin(read, read.began)
    why = None
    try:
        for wait_s, received in steps(read):
            await asyncio.sleep(wait_s)
            read.position += received
    except asyncio.CancelledError:
        why = read.settle()
        assert why is not None
    finally:
        watch.end(read)
        watch.close()
    return why, loop.time()


@pytest.mark.parametrize(("steps", "why", "at"), [
    ([(9.9, 1), (4.9, 1)], None, 14.8),
    ([(99.0, 0)], "no first byte within 10 seconds", 10.0),
    ([(1.0, 50_000), (99.0, 0)], "no byte for 5 seconds", 6.0),
    ([(1.0, 999)] * 60, "fewer than 1000 bytes a second for 30 seconds", 31.0),
    ([(1.0, 1100)] * 60, None, 60.0),
    ([(1.0, 10**6)] * 200, "not all within 100 seconds", 100.0),
])  # fmt: skip
def test_first_broken_limit_ends_the_read(steps: list[tuple[float, int]], why: str | None, at: float) -> None:
    (ended, seconds), _ = simulate(watched(lambda _: steps))
    assert ended == why
    assert at <= seconds <= at + 2.1


@pytest.mark.parametrize(("progress", "ends_at"), [(float("inf"), None), (-1.0, 100.0)])
def test_waiting_for_a_turn_counts_only_without_progress(progress: float, ends_at: float | None) -> None:
    def steps(read: Read) -> list[tuple[float, int]]:
        read.waits_for = SimpleNamespace(succeeded_at=progress)  # type: ignore[assignment]
        return [(500.0, 0)]

    (why, seconds), _ = simulate(watched(steps))
    assert (why is None) is (ends_at is None)
    assert seconds == pytest.approx(ends_at or 500.0, abs=1.1)


def test_cancellation_is_not_reported_as_a_time_limit() -> None:
    async def run() -> None:
        task = asyncio.ensure_future(watched(lambda _: [(50.0, 0)]))
        await asyncio.sleep(9.0)
        task.cancel()
        with pytest.raises(AssertionError):  # of `settle`: it was not the watch
            await task

    simulate(run())


def test_time_the_loop_was_blocked_does_not_count() -> None:
    async def run() -> None:
        clock_ahead = 0.0
        loop = asyncio.get_running_loop()
        watch, read = DeadlineTimer(OPTIONS, lambda: loop.time() + clock_ahead), Read(0)
        read.start_now(0.0)
        watch.begin(read, 0.0)
        await asyncio.sleep(2.5)
        clock_ahead = 60.0
        await asyncio.sleep(1.0)  # the watch has looked, late
        read.position = 100_000
        await asyncio.sleep(3.0)
        assert read.stopped_by is None
        watch.end(read)
        watch.close()

    simulate(run())


def test_timer_runs_only_while_something_is_watched() -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        watch, read = DeadlineTimer(OPTIONS, loop.time), Read(0)
        watch.begin(read, loop.time())
        watch.end(read)
        await asyncio.sleep(5.0)
        return loop.timers  # type: ignore[attr-defined, no-any-return]

    assert simulate(run())[0] <= 1  # that of `simulate` itself
