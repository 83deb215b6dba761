"""Counters of a loader of torch data sets, partly in memory shared with its workers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from time import perf_counter

from headrace.observe.stats import DeliverStats, FetchStats, LoaderMeters, Stats, WorkStats
from headrace.torch_regime.workers.pool import TorchWorkerPool


class LoaderCounts:
    """Counters of one loader over all its iterators, without references to them."""

    def __init__(self, step: str, workers: int) -> None:
        self.meters = LoaderMeters()
        self.bytes = 0
        self.step, self._workers = step, workers
        self._ended: Counter[str] = Counter()  # counts of closed crews
        self._crews: weakref.WeakSet[TorchWorkerPool] = weakref.WeakSet()
        self._lock = threading.RLock()  # a signal handler may read in the middle of a change

    def clock(self) -> Clock:
        self.meters.begin()
        return Clock(self)

    def follow(self, pool: TorchWorkerPool) -> None:
        with self._lock:
            self._crews.add(pool)
        pool.closing = self.fold

    def fold(self, pool: TorchWorkerPool) -> None:
        with self._lock:
            if pool in self._crews:
                self._crews.discard(pool)
                self._ended.update(pool.counted())

    def stats(self, epoch: int) -> Stats:
        meters = self.meters
        with self._lock:
            crews = list(self._crews)
            done = Counter(self._ended)
            for pool in crews:
                done.update(pool.counted())
        busy_s = dict(meters.busy_s)
        for name, key in ((self.step, "samples"), ("collate", "collate"), ("start", "start")):
            if done[key]:
                busy_s[name] = busy_s.get(name, 0.0) + done[key] / 1e9
        return Stats(
            epoch=epoch,
            elapsed_s=meters.elapsed_s(),
            fetch=FetchStats(),
            work=WorkStats(
                workers=max(1, self._workers), busy_s=busy_s, deaths=done["deaths"], is_inline=not self._workers
            ),
            deliver=DeliverStats(
                batches=meters.batches,
                samples=meters.samples,
                bytes=self.bytes,
                wait_s=meters.wait_s,
                first_wait_s=meters.first_wait_s,
                trainer_s=meters.trainer_s,
            ),
            shared_bytes=sum(pool.places.nbytes for pool in crews),
            budget_bytes=0,
            started_s=None,
        )


class Clock:
    """Waiting time of the trainer for the batches of one epoch, and the time between them.

    Batches may take a few microseconds each. So counts are collected here until a batch is returned, and each moment is
    measured once.
    """

    def __init__(self, counts: LoaderCounts) -> None:
        self._counts, self._meters = counts, counts.meters
        self._asked: float | None = None
        self._left: float | None = None
        self._made: float | None = None  # time when the batch was made inside `next`
        self._collate_s = 0.0  # part of that spent in collation

    def ask(self) -> None:
        if self._asked is None:
            self._asked = perf_counter()

    def timed(self, collate_fn: Callable[[object], object]) -> Callable[[object], object]:
        def collate(samples: object) -> object:
            began = perf_counter()
            try:
                return collate_fn(samples)
            finally:
                self._collate_s += perf_counter() - began

        return collate

    def made(self) -> None:
        self._made = perf_counter()

    def got(self, samples: int, nbytes: int = 0) -> None:
        now = perf_counter()
        asked = now if self._asked is None else self._asked
        self._meters.count_next(samples, now - asked, None if self._left is None else asked - self._left)
        if nbytes:
            self._counts.bytes += nbytes
        if self._collate_s or self._made is not None:
            self._count_made(asked)
        self._asked, self._left = None, now

    def _count_made(self, asked: float) -> None:
        busy_s, step = self._meters.busy_s, self._counts.step
        if self._made is not None:
            busy_s[step] = busy_s.get(step, 0.0) + self._made - asked - self._collate_s
        if self._collate_s:
            busy_s["collate"] = busy_s.get("collate", 0.0) + self._collate_s
        self._made, self._collate_s = None, 0.0
