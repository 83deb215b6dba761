"""Time limits of all requests of one reader, by one timer: one for each request is too slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.options import FetchOptions
from headrace.types import Fills

RATE_WINDOW_S = 30.0
_LEAST_S = 0.001


class TransferProgress(Protocol):
    succeeded_at: float


class Watched:
    """A read with time limits. Its task is cancelled to interrupt it, as by `asyncio.timeout`.

    Attributes:
        position: Byte of the object that was reached, without received bytes of `body`.
        waits_for: What the read waits for instead of the store. Time in which that makes progress does not count.
        stopped_by: Reason of the interruption, or None.
        paused_s: Seconds that do not count.
    """

    __slots__ = (
        "_cancelling", "_from", "_seen", "_since", "_task", "_window_at", "_window_from",
        "began", "body", "paused_s", "position", "stopped_by", "waits_for",
    )  # fmt: skip

    def __init__(self, position: int) -> None:
        self.position = position
        self.body: Fills | None = None
        self.waits_for: TransferProgress | None = None
        self.stopped_by: str | None = None
        self.began = self.paused_s = 0.0

    def start_now(self, now: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self.began = now

    def look(self, now: float) -> None:
        self._since = now
        self._from = self._seen = self.reached

    @property
    def reached(self) -> int:
        body = self.body
        return self.position if body is None else self.position + body.received + getattr(body, "skipped", 0)

    def time_s(self, options: FetchOptions) -> float:
        raise NotImplementedError

    def interrupt(self, why: str) -> None:
        if self.stopped_by is None:
            self.stopped_by = why
            self._task.cancel()

    def settle(self) -> str | None:
        """Return the reason if only `interrupt` cancelled the task; else None. Called afterwards."""
        why, self.stopped_by = self.stopped_by, None
        return why if why is not None and self._task.uncancel() <= self._cancelling else None

    def judge(self, now: float, options: FetchOptions) -> str | None:
        reached = self.reached
        waits_for = self.waits_for
        if waits_for is not None:
            if waits_for.succeeded_at > self._since:
                self.paused_s += now - self._since
                self._since = now
        elif reached != self._seen:
            if self._seen == self._from:
                self._window_at, self._window_from = now, reached
            self._seen, self._since = reached, now
        elif reached == self._from:
            if now - self._since >= options.first_byte_timeout_s:
                return f"no first byte within {options.first_byte_timeout_s:g} seconds"
        elif now - self._since >= options.stall_timeout_s:
            return f"no byte for {options.stall_timeout_s:g} seconds"
        if waits_for is None and reached != self._from and now - self._window_at >= RATE_WINDOW_S:
            if reached - self._window_from < options.min_rate_bytes_s * (now - self._window_at):
                return f"fewer than {options.min_rate_bytes_s} bytes a second for {RATE_WINDOW_S:g} seconds"
            self._window_at, self._window_from = now, reached
        if now - self.began - self.paused_s >= self.time_s(options):
            return f"not all within {self.time_s(options):g} seconds"
        return None


class Hedged(Protocol):
    def hedge(self, now: float) -> float:
        """Start the hedges that are due. Return the time of the next check, or infinity."""
        ...


class DeadlineTimer:
    def __init__(self, options: FetchOptions, clock: Callable[[], float]) -> None:
        self._options, self._clock = options, clock
        self._watched: dict[Watched, None] = {}
        self._hosts: dict[Hedged, None] = {}
        limits = (options.first_byte_timeout_s, options.stall_timeout_s, options.total_timeout_s)
        self._each_s = min(1.0, min(limits) / 8.0)
        self._look_at = self._due = 0.0
        self._was_late = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, watched: Watched, now: float) -> None:
        watched.look(now)
        self._watched[watched] = None
        if self._timer is None:
            self._look_at = now + self._each_s
            self._arm(now, self._look_at)

    def end(self, watched: Watched) -> None:
        self._watched.pop(watched, None)

    def hedge(self, endpoint: Hedged, now: float, due: float) -> None:
        self._hosts[endpoint] = None
        if due < self._due or self._timer is None:
            self._arm(now, due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now: float, due: float) -> None:
        self.close()
        self._due = max(due, now + _LEAST_S)
        self._timer = asyncio.get_running_loop().call_later(self._due - now, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        self._timer = None
        if now >= self._look_at:
            # If the loop was blocked (a stopped process, a long callback), the sockets may hold bytes.
            # They are read first.
            self._was_late = now - self._look_at > self._each_s and not self._was_late
            self._look_at = now + self._each_s
            if not self._was_late:
                self._judge(now)
        due = self._look_at
        for endpoint in list(self._hosts):
            again = endpoint.hedge(now)
            if again == float("inf"):
                del self._hosts[endpoint]
            due = min(due, again)
        if self._watched:
            self._arm(now, due)

    def _judge(self, now: float) -> None:
        for watched in list(self._watched):
            why = watched.judge(now, self._options)
            if why is not None:
                watched.interrupt(why)
