"""What the fetch stage counts: plain numbers, changed by one event loop and read from anywhere."""

from __future__ import annotations

from typing import Literal

from headrace.fetch.held import TimedFunction
from headrace.fetch.ranges import UNWANTED_SHARE


class Meter:
    """Counters of one reader.

    Attributes:
        requests: requests begun.
        retries: requests that were made again, or went on where another one was cut.
        errors: reads that failed for good.
        bytes: bytes of bodies received.
        in_flight: requests under way now.
        waiting_s: seconds in which at least one request was under way.
        hedges: second requests made because a first byte was late; they count among `requests`.
        hedges_won: how many of them were answered first.
        coalesced: ranges that were read with another one's request.
        cached: reads that the cache has answered.
        shards_whole, shards_in_part: shards with an index of which all was asked for, or only what was wanted of them.
        throttled: answers by which a store asked for fewer requests.
        level: how many requests at once the host gets that failed last; 0: none was held back yet.
        lowest_level: the lowest `level` so far.
        functions: the user's own that run on the loop or beside it, by name.
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
        """Where a function counts."""
        if name not in self.functions:
            self.functions[name] = TimedFunction(where)
        return self.functions[name]

    def begin(self, now: float) -> None:
        """A request begins."""
        self.requests += 1
        if not self.in_flight:
            self._busy_since = now
        self.in_flight += 1

    def count_shard(self, nbytes: int, size: int) -> None:
        """A shard of `size` bytes is read by requests for `nbytes` of them."""
        is_whole = nbytes >= (1 - UNWANTED_SHARE) * size
        self.shards_whole += is_whole
        self.shards_in_part += not is_whole

    def end(self, now: float) -> None:
        """A request has ended, well or not."""
        self.in_flight -= 1
        if not self.in_flight:
            self.waiting_s += now - self._busy_since
