"""Requests for one range until it is all there: attempts, waits between them, and the error when they are over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from headrace.errors import ReadTimeoutError, StorageError
from headrace.fetch.meter import Meter
from headrace.fetch.policy.goal import Goal
from headrace.fetch.policy.host import Failure, Host, close
from headrace.fetch.policy.retry import RetryPolicy
from headrace.fetch.policy.turns import Gate
from headrace.fetch.policy.watch import Watch
from headrace.options import FetchOptions
from headrace.types import Store

_MANY_HOSTS = 512


class _OurMemory:
    """What a read waits for that has to be paid for first: its own side, and never the store."""

    succeeded_at = float("inf")


_OUR_MEMORY = _OurMemory()


class Attempts:
    """The requests of one reader.

    Args:
        options: time limits and attempts.
        concurrency: requests under way at once.
        meter: where to count.
        clock: monotonic seconds; decides when a range's time is over.
        rng: draws the waits between attempts.
    """

    def __init__(
        self,
        options: FetchOptions,
        concurrency: int,
        meter: Meter,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._options, self._concurrency = options, concurrency
        self._meter, self._clock, self._rng = meter, clock, rng
        self._policy = RetryPolicy.of(options)
        self._watch = Watch(options, clock)
        self._everyone = Gate(concurrency)
        self._hosts: dict[int, Host] = {}

    async def fetch(self, store: Store, path: str, goal: Goal) -> None:
        """Reach `goal`.

        Raises:
            StorageError: no further attempt is of use, or left.
        """
        host = self._host(store)
        if not host.try_enter():
            await host.enter()
        goal.start_now(self._clock())
        attempt, alike = 1, 0
        kind: type[Failure] | None = None
        while (failure := await self._attempt(host, path, goal, attempt)) is not None:
            alike, kind = alike + 1 if type(failure) is kind else 1, type(failure)
            try:
                if not await self._may_try_again(host, goal, failure, attempt, alike):
                    self._meter.errors += 1
                    raise _final(failure, goal, attempt) from failure
            finally:
                # Its traceback holds this frame, and so the target: kept here it would be a cycle.
                del failure
            attempt += 1

    async def aclose(self) -> None:
        """End timers and second requests; no fetch may be under way."""
        self._watch.close()
        for host in self._hosts.values():
            await host.aclose()

    def _host(self, store: Store) -> Host:
        host = self._hosts.get(id(store))
        if host is None:
            if len(self._hosts) >= _MANY_HOSTS:
                self._hosts = {key: host for key, host in self._hosts.items() if not host.is_idle}
            host = Host(store, self._everyone, self._concurrency, self._options, self._meter, self._clock)
            self._hosts[id(store)] = host
        return host

    async def _attempt(self, host: Host, path: str, goal: Goal, attempt: int) -> Failure | None:
        """One request, which leaves the host's gate in the end; gives what failed.

        The failure is in no variable of this frame, which its traceback holds: the cycle would keep the target.
        """
        meter, watch = self._meter, self._watch
        began = self._clock()
        goal.is_inside = True
        meter.begin(began)
        watch.begin(goal, began)
        due = host.due(began)
        if due < float("inf"):
            watch.hedge(host, began, due)
        try:
            answer = await host.ask(path, goal, began)
            try:
                goal.accept(answer)
                if goal.charge is not None:
                    await self._pay(host, goal)
                await goal.receive(answer, meter)
            finally:
                await close(answer)
            goal.check_end()
            host.succeeded(again=attempt > 1)
            return None
        except asyncio.CancelledError:
            why = goal.settle()
            if why is None:
                raise
            return host.failed(ReadTimeoutError(why, url=goal.url), began)
        except (StorageError, OSError) as error:
            return host.failed(error, began)
        finally:
            watch.end(goal)
            meter.end(self._clock())
            if goal.stopped_by is not None:
                goal.settle()
            if goal.is_inside:
                host.leave()

    async def _pay(self, host: Host, goal: Goal) -> None:
        """Have the bytes charged for; a wait for that holds nobody else up."""

        def step_out() -> None:
            goal.is_inside = False
            goal.waits_for = _OUR_MEMORY
            host.leave()

        if goal.charge is None or goal.asked_stop is None:
            return
        charge, goal.charge = goal.charge, None
        admitted = charge(goal.asked_stop - goal.position)
        if admitted is None:
            return
        waiting = asyncio.get_running_loop().call_soon(step_out)
        try:
            await admitted
            if not goal.is_inside:
                await host.enter(again=True)
                goal.is_inside = True
        finally:
            waiting.cancel()
            goal.waits_for = None
        goal.look(self._clock())

    async def _may_try_again(self, host: Host, goal: Goal, failure: Failure, attempt: int, alike: int) -> bool:
        """Wait for the next attempt's turn; then we are inside the host's gate."""
        left_s = goal.began + goal.paused_s + goal.time_s(self._options) - self._clock()
        wait_s = self._policy.wait_s(failure, attempt, alike, left_s, self._rng)
        if wait_s is None:
            return False
        self._meter.retries += 1
        await asyncio.sleep(wait_s)
        goal.waits_for = host
        self._watch.begin(goal, self._clock())
        try:
            await host.quota.take()
            try:
                await host.enter(again=True)
            except asyncio.CancelledError:
                host.quota.give(1.0)
                raise
        except asyncio.CancelledError:
            if goal.settle() is None:
                raise
            return False
        finally:
            self._watch.end(goal)
            goal.waits_for = None
        return True


def _final(error: Failure, goal: Goal, attempts: int) -> StorageError:
    """The error for the caller: of the same kind, and with the range and the number of attempts."""
    kind: type[StorageError] = StorageError
    status = retry_after_s = None
    if isinstance(error, StorageError):
        kind = next(c for c in type(error).__mro__ if c.__module__ == StorageError.__module__)
        reason, status, retry_after_s = error.reason, error.status, error.retry_after_s
    elif isinstance(error, TimeoutError):
        kind, reason = ReadTimeoutError, str(error) or "no answer in time"
    else:
        reason = f"{type(error).__name__}: {error}"
    return kind(
        reason,
        url=goal.url,
        start=goal.start,
        stop=goal.stop,
        attempts=attempts,
        status=status,
        retry_after_s=retry_after_s,
    )
