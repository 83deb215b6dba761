"""The verdict and the table of a report, its meters, and what measuring costs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace import observe
from headrace._util.shared_memory import bytes_in
from headrace.fetch.meter import TimedFunction, WatchedIterator
from headrace.observe import DeliverStats, FetchStats, Function, LoaderMeters, SkippedSample, Stats, WorkStats
from headrace.observe.report import report, verdict

CALLS = 1000


class Own:
    """An awaitable of the user's."""

    def __await__(self) -> Any:
        yield from ()


class Feed(AsyncIterator[Any]):
    def __anext__(self) -> Any:
        return Own()


def calls_in(function: Callable[[], Any]) -> int:
    calls = itertools.count()
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _argument: next(calls) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(before)
    return next(calls)


@pytest.mark.parametrize(("watches", "limit"), [("function", 1.3), ("iterator", 2.3)])
def test_watching_adds_one_call_and_wraps_few_awaitables(watches: str, limit: float) -> None:
    timed = TimedFunction("loop")
    call = timed.watched(Own) if watches == "function" else WatchedIterator(Feed(), timed).__anext__
    given: list[Any] = []
    assert calls_in(lambda: given.extend([call() for _ in range(CALLS)])) < limit * CALLS
    kept = [awaitable for awaitable in given if isinstance(awaitable, Own)]
    assert timed.calls == CALLS
    assert CALLS * 0.8 < len(kept) < CALLS


@pytest.mark.parametrize(("value", "nbytes"), [
    ([], 0),
    ([1, 2.0, True, None, 1j], 0),
    ([1, b"12", "345", bytearray(4)], 9),
    ((1, [2, np.zeros(3, np.int64)]), 24),
    ([{"a": b"12", "b": 1}, {"a": b"3", "b": [b"4"]}], 4),
    (np.int64(1), 8),
    ([np.bool_(True), True], 1),
])  # fmt: skip
def test_bytes_are_counted_in_all_when_some_values_have_none(value: Any, nbytes: int) -> None:
    assert bytes_in(value) == nbytes
    assert calls_in(lambda: bytes_in(list(range(CALLS)))) < 10, "numbers cost no call each"


def stats(
    *,
    wait_s: float = 5.0,
    trainer_s: float = 5.0,
    busy_s: dict[str, float] | None = None,
    workers: int = 2,
    batches: int = 100,
    elapsed_s: float = 11.0,
    **more: Any,
) -> Stats:
    return Stats(
        epoch=0,
        elapsed_s=elapsed_s,
        fetch=FetchStats(requests=1234, retries=5, bytes=3 * 2**30, active_s=9.5, reading_s=9.5),
        work=WorkStats(workers=workers, busy_s=busy_s or {}, deaths=more.pop("deaths", 0)),
        deliver=DeliverStats(
            batches=batches, samples=64 * batches, wait_s=wait_s, trainer_s=trainer_s, first_wait_s=1.0
        ),
        shared_bytes=700 * 2**20,
        budget_bytes=2 * 2**30,
        started_s=more.pop("started_s", 0.5),
        **more,
    )


def test_a_store_that_asks_for_fewer_requests_is_the_limit_and_more_are_not_advised() -> None:
    fetch = FetchStats(requests=1000, throttled=80, lowest_level=3, active_s=9.5, reading_s=9.5)
    got = verdict(replace(stats(busy_s={"map(f)": 2.0}), fetch=fetch))
    assert got.bound_by == "fetch"
    assert "80 times" in got.sentence
    assert "concurrency" not in got.sentence
    few = replace(fetch, throttled=8)
    assert "concurrency" in verdict(replace(stats(busy_s={"map(f)": 2.0}), fetch=few)).sentence


def test_report_names_the_first_samples_that_were_skipped() -> None:
    samples = tuple(SkippedSample(0, 7 * k, f"'{k:06d}'" if k else "", f"ValueError: line\nof {k}") for k in range(5))
    text = report(replace(stats(), skipped=1200, skipped_samples=samples))
    assert "skipped  1,200 samples: sample 0 (ValueError: line of 0), '000001' (ValueError: line of 1)" in text
    assert text.count("ValueError") == 3
    assert "and 1,197 more" in text
    long = replace(stats(), skipped=1, skipped_samples=(SkippedSample(0, 0, "0", "x" * 1000),))
    assert "skipped  1 sample: 0 (xxx" in report(long)
    assert "more" not in next(line for line in report(long).splitlines() if "skipped" in line)
    assert "x" * 100 not in report(long)
    assert "skipped" not in report(stats())


TEXTS: dict[str, tuple[Stats, list[str]]] = {
    "figures": (
        stats(busy_s={"map(f)": 6.0, "write": 2.0}, deaths=2),
        [
            "6,400 samples in 100 batches",
            "1,234 requests (5 again)",
            "3.0 GiB",
            "2 workers",
            "map(f) 75%, write 25%",
            "waited 1.00 s for first batches, then 50%",
            "700.0 MiB shared of a budget of 2.0 GiB",
            "2 workers ended and were replaced",
        ],
    ),
    "fetch": (
        replace(
            stats(busy_s={"map(f)": 2.0}),
            fetch=FetchStats(
                requests=900, throttled=7, lowest_level=3, hedges=40, hedges_won=31, coalesced=1200, cached=50
            ),
        ),
        [
            "asked for fewer requests 7 times, down to 3 requests at once",
            "40 second requests, 31 of them answered first",
            "1,200 reads joined to others, 50 from the cache",
        ],
    ),
    "no batches": (replace(stats(), deliver=DeliverStats()), ["nothing yet", "Too few batches"]),
}


@pytest.mark.parametrize(("figures", "texts"), TEXTS.values(), ids=TEXTS)
def test_report_has_the_figures_with_units_and_the_verdict(figures: Stats, texts: list[str]) -> None:
    text = report(figures)
    assert [one for one in texts if one not in text] == [], text
    assert text.splitlines()[-1] == verdict(figures).sentence
    assert ("second requests" in text) == (figures.fetch.hedges > 0)


def test_user_code_that_blocks_the_loop_is_the_limit() -> None:
    functions = {"Get.aget": Function("loop", 1000, 7.3), "map(f)": Function("loop", 9, 0.1)}
    fetch = FetchStats(reading_s=9.5, functions=functions)
    slow = replace(stats(busy_s={"map(g)": 2.0}), fetch=fetch)
    got = verdict(slow)
    assert got.bound_by == "loop"
    assert (
        "Your coroutine Get.aget is the limit: it holds the event loop 7.3 ms a call, 70% of the time" in got.sentence
    )
    assert "Get.aget holds the loop 7.30 ms a call, 1,000 calls" in report(slow)
    free = replace(slow.deliver, first_wait_s=0.1, wait_s=0.1, trainer_s=10.0)
    assert verdict(replace(slow, deliver=free)).bound_by == "trainer"
    assert verdict(replace(slow, work=replace(slow.work, busy_s={"map(g)": 19.0}))).bound_by == "work"
    little = replace(fetch, functions={"Get.aget": Function("loop", 1000, 1.0)})
    assert verdict(replace(slow, fetch=little)).bound_by == "fetch"
    at_once = replace(slow.deliver, first_wait_s=10.9, wait_s=0.1, trainer_s=0.0)  # the loop could give nothing before
    assert verdict(replace(slow, deliver=at_once)).bound_by == "loop"


IDLE = stats(busy_s={"map(g)": 2.0})
SHORT = {"wait_s": 0.3, "trainer_s": 0.1}
VERDICTS: dict[str, tuple[Stats, str, list[str]]] = {
    "trainer hardly waits": (stats(wait_s=0.5, trainer_s=9.5, busy_s={"map(f)": 19.0}), "trainer", []),
    "idle workers": (IDLE, "fetch", ["concurrency"]),
    "slowest step of busy workers": (
        stats(busy_s={"map(slow)": 12.0, "decode(rgb8)": 5.0, "write": 1.0, "collate": 1.0}),
        "work",
        ["map(slow)", "63%"],
    ),
    "busy workers mostly collate": (stats(busy_s={"map(f)": 4.0, "collate": 15.0}), "collate", []),
    "busy workers mostly write": (stats(busy_s={"map(f)": 4.0, "write": 15.0}), "collate", []),
    **{f"{batches} batches": (stats(batches=batches), "unknown", []) for batches in range(3)},
    "program does other things": (stats(busy_s={"map(slow)": 19.0}, elapsed_s=5000.0), "work", []),
    "workers start": (stats(started_s=1.0, wait_s=0.9, trainer_s=0.0, busy_s={"map(slow)": 1.6}), "work", []),
    "processes start": (
        stats(busy_s={"map(f)": 0.1}, started_s=0.9, **SHORT),
        "work",
        ["The start of the workers is the limit so far: 0.9 s of 1.4 s"],
    ),
    "workers import": (
        stats(busy_s={"map(f)": 0.1, "start": 1.6}, started_s=0.05, **SHORT),
        "work",
        ["The start of the workers is the limit so far: 0.9 s of 1.4 s"],
    ),
    "busy workers had started": (stats(busy_s={"map(f)": 19.0, "start": 1.6}, started_s=0.05), "work", ["map(f)"]),
    "threads compute": (
        replace(IDLE, fetch=FetchStats(reading_s=9.5, functions={"F.__getitem__": Function("threads", 500, 9.0, 0.0)})),
        "loop",
        ["Your F.__getitem__ is the limit: it computes 18.0 ms a call, 86% of the time, in threads"],
    ),
    "threads wait": (
        replace(IDLE, fetch=FetchStats(reading_s=9.5, functions={"F.__getitem__": Function("threads", 500, 0.1, 9.0)})),
        "fetch",
        ["Your F.__getitem__ is the limit: it waits 18.0 ms a call", "hr.from_map(…, threads=16)"],
    ),
    "neither reading nor workers are busy": (
        replace(stats(busy_s={"map(f)": 6.6}), fetch=FetchStats(reading_s=0.5)),
        "unknown",
        [
            "the trainer waits 50% of its time, while the workers are busy only 31%",
            "0.5 s of 11.0 s were the workers' start",
        ],
    ),
}


@pytest.mark.parametrize(("figures", "bound_by", "texts"), VERDICTS.values(), ids=VERDICTS.keys())
def test_verdict_names_the_limit(figures: Stats, bound_by: str, texts: list[str]) -> None:
    got = verdict(figures)
    assert got.bound_by == bound_by
    assert all(text in got.sentence for text in texts), got.sentence


def test_busy_share_is_counted_without_the_start_of_workers() -> None:
    figures, _, _ = VERDICTS["workers import"]
    assert figures.busy_share == pytest.approx(0.1 / (2 * (1.4 - 0.85)))


def test_first_batches_are_counted_separately() -> None:
    meters = LoaderMeters()
    meters.count_next(8, 2.0, None)
    meters.count_next(8, 0.25, 1.0)
    meters.count_next(3, 3.0, None)
    assert (meters.batches, meters.first_wait_s, meters.wait_s, meters.trainer_s) == (3, 5.0, 0.25, 1.0)


def test_reading_time_continues_when_one_of_two_epochs_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(observe.time, "perf_counter", lambda: now[0])
    meters, first, second = LoaderMeters(), object(), object()
    for at, epoch, is_reading in ((1, first, True), (2, second, True), (3, first, False), (7, second, False)):
        now[0] = float(at)
        meters.set_reading(epoch, is_reading)
    assert meters.reading_s == 6
