"""Counters of the fetch stage, written by one event loop and read from any thread."""

from __future__ import annotations

from typing import Literal

from headrace.fetch.held import TimedFunction
from headrace.fetch.ranges import UNWANTED_SHARE


class Meter:
    """Counters of one reader. The others are described in `FetchStats`.

    Attributes:
        requests: Requests started, with `hedges`.
        retries: Repeated requests, and requests that continued a body that broke off.
        waiting_s: Seconds in which at least one request was running.
        level: Concurrency limit of the host that failed last. 0: no host was limited yet.
        functions: Functions of the user on the loop or in threads, by name.
    """

    __slots__ = (
        "_busy_since", "bytes", "cached", "coalesced", "errors", "functions", "hedges", "hedges_won", "in_flight",
        "level", "lowest_level", "requests", "retries", "shards_in_part", "shards_whole", "throttled", "waiting_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.retries = self.errors = self.bytes = self.in_flight = 0
        self.hedges = self.hedges_won = self.throttled = self.level = self.lowest_level = 0
        self.cached = self.coalesced = 0
        self.shards_whole = self.shards_in_part = 0
        self.functions: dict[str, TimedFunction] = {}
        self.waiting_s = 0.0
        self._busy_since = 0.0

    def held(self, name: str, where: Literal["loop", "threads"] = "loop") -> TimedFunction:
        if name not in self.functions:
            self.functions[name] = TimedFunction(where)
        return self.functions[name]

    def begin(self, now: float) -> None:
        self.requests += 1
        if not self.in_flight:
            self._busy_since = now
        self.in_flight += 1

    def count_shard(self, nbytes: int, size: int) -> None:
        is_whole = nbytes >= (1 - UNWANTED_SHARE) * size
        self.shards_whole += is_whole
        self.shards_in_part += not is_whole

    def end(self, now: float) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.waiting_s += now - self._busy_since
