"""Requests for one range until it is complete: attempts, waits, and the final error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    ObjectChangedError,
    ObjectMissingError,
    ReadTimeoutError,
    StorageError,
)
from headrace.fetch.hosts import Endpoint, ReadFailure, Semaphore, close
from headrace.fetch.meter import Meter
from headrace.fetch.range_request import DeadlineTimer, RangeRequest
from headrace.fetch.stores.addresses import host_of, is_local, panic_in
from headrace.options import Fetch
from headrace.types import Store

_MANY_HOSTS = 512


class Attempts:
    """The requests of one reader. `clock` gives monotonic seconds, `rng` the random waits."""

    def __init__(
        self, options: Fetch, concurrency: int, meter: Meter, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._options, self._concurrency = options, concurrency
        self._meter, self._clock, self._rng = meter, clock, rng
        self._policy = RetryPolicy.of(options)
        self._watch = DeadlineTimer(options, clock)
        self._everyone = Semaphore(concurrency)
        self._hosts: dict[str | int, Endpoint] = {}

    async def fetch(self, store: Store, path: str, request: RangeRequest) -> None:
        """Complete `request`, with all attempts. Raises StorageError if no further attempt is left, or would help."""
        endpoint = self._endpoint(store)
        if not endpoint.try_enter():
            await endpoint.enter()
        request.start_now(self._clock())
        attempt, alike = 1, 0
        kind: type[ReadFailure] | None = None
        while (failure := await self._attempt(endpoint, store, path, request, attempt)) is not None:
            alike, kind = alike + 1 if type(failure) is kind else 1, type(failure)
            try:
                if not await self._may_try_again(endpoint, request, failure, attempt, alike):
                    self._meter.errors += 1
                    raise _final(failure, request, attempt) from failure
            finally:
                # Its traceback refers to this frame, and so to the target: a variable here would make a cycle.
                del failure
            attempt += 1

    async def aclose(self) -> None:
        self._watch.close()
        for endpoint in self._hosts.values():
            await endpoint.aclose()

    def _endpoint(self, store: Store) -> Endpoint:
        host = host_of(store)
        endpoint = self._hosts.get(host)
        if endpoint is None:
            if len(self._hosts) >= _MANY_HOSTS:
                self._hosts = {key: endpoint for key, endpoint in self._hosts.items() if not endpoint.is_idle}
            endpoint = self._hosts[host] = Endpoint(
                self._everyone, self._concurrency, self._options, self._meter, self._clock, is_far=not is_local(store)
            )
        return endpoint

    async def _attempt(
        self, endpoint: Endpoint, store: Store, path: str, request: RangeRequest, attempt: int
    ) -> ReadFailure | None:
        """Make one request. Return its failure, or None.

        No variable of this frame holds the failure: its traceback refers to the frame, and the cycle would keep the
        target.
        """
        meter, watch = self._meter, self._watch
        began = self._clock()
        request.is_inside = True
        meter.begin(began)
        watch.begin(request, began)
        due = endpoint.due(began)
        if due < float("inf"):
            watch.hedge(endpoint, began, due)
        try:
            answer = await endpoint.ask(store, path, request, began)
            try:
                request.accept(answer)
                if request.charge is not None:
                    await self._pay(endpoint, request)
                await request.receive(answer, meter)
            finally:
                await close(answer)
            request.check_end()
            endpoint.succeeded(again=attempt > 1)
            return None
        except asyncio.CancelledError:
            why = request.settle()
            if why is None:
                raise
            return endpoint.failed(ReadTimeoutError(why, url=request.url), began)
        except (StorageError, OSError) as error:
            return endpoint.failed(error, began)
        except BaseException as error:
            panic = panic_in(error, request.url, store)
            if panic is None:
                raise
            return endpoint.failed(panic, began)
        finally:
            watch.end(request)
            meter.end(self._clock())
            if request.stopped_by is not None:
                request.settle()
            if request.is_inside:
                endpoint.leave()

    async def _pay(self, endpoint: Endpoint, request: RangeRequest) -> None:
        """Wait until the memory budget admits the bytes. A long wait frees the slot of the host."""

        def step_out() -> None:
            request.is_inside = False
            request.waits_for = lambda: float("inf")  # a wait for memory never counts against the store
            endpoint.leave()

        if request.charge is None or request.asked_stop is None:
            return
        charge, request.charge = request.charge, None
        admitted = charge(request.asked_stop - request.position)
        if admitted is None:
            return
        waiting = asyncio.get_running_loop().call_soon(step_out)
        try:
            await admitted
            if not request.is_inside:
                await endpoint.enter(again=True)
                request.is_inside = True
        finally:
            waiting.cancel()
            request.waits_for = None
        request.look(self._clock())

    async def _may_try_again(
        self, endpoint: Endpoint, request: RangeRequest, failure: ReadFailure, attempt: int, alike: int
    ) -> bool:
        left_s = request.began + request.paused_s + request.time_s(self._options) - self._clock()
        wait_s = self._policy.wait_s(failure, attempt, alike, left_s, self._rng)
        if wait_s is None:
            return False
        self._meter.retries += 1
        await asyncio.sleep(wait_s)
        request.waits_for = lambda: endpoint.succeeded_at
        self._watch.begin(request, self._clock())
        try:
            await endpoint.retry_budget.take()
            try:
                await endpoint.enter(again=True)
            except asyncio.CancelledError:
                endpoint.retry_budget.give(1.0)
                raise
        except asyncio.CancelledError:
            if request.settle() is None:
                raise
            return False
        finally:
            self._watch.end(request)
            request.waits_for = None
        return True


def _final(error: ReadFailure, request: RangeRequest, attempts: int) -> StorageError:
    if not isinstance(error, StorageError):
        is_late, text = isinstance(error, TimeoutError), str(error)
        error = (
            ReadTimeoutError(text or "no answer in time")
            if is_late
            else StorageError(f"{type(error).__name__}: {text}")
        )
    return error.about(request.url, request.start, request.stop, attempts)


_FINAL = (ObjectMissingError, AccessDeniedError, ObjectChangedError)
_PASSING_STATUS = (408, 425, 429)
_BAD_RESPONSES = 2
_LONGEST_ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: wait n is random, at most `backoff_s` · 2ⁿ⁻¹ and `backoff_cap_s`.

    Of the kinds compared in Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015, full jitter made
    the fewest calls. Readers that failed together do not retry together. So Retry-After (at most a minute), which is
    the same for all readers, is added to the random wait.
    """

    attempts: int
    backoff_s: float
    backoff_cap_s: float

    @classmethod
    def of(cls, options: Fetch) -> RetryPolicy:
        return cls(options.attempts, options.backoff_s, options.backoff_cap_s)

    def requests_for(self, error: BaseException) -> int:
        if isinstance(error, ObjectChangedError) and not error.is_certain:
            return min(_BAD_RESPONSES, self.attempts)
        if isinstance(error, _FINAL) or not isinstance(error, (StorageError, OSError)):
            return 1
        if isinstance(error, BadResponseError):
            # A proxy's mistake is temporary, missing support of ranges is not: one more request distinguishes them.
            return min(_BAD_RESPONSES, self.attempts)
        status = getattr(error, "status", None)
        if status is not None and 400 <= status < 500 and status not in _PASSING_STATUS:
            return 1
        return self.attempts

    def wait_s(self, error: BaseException, attempt: int, alike: int, left_s: float, rng: random.Random) -> float | None:
        """Return the wait in seconds after attempt `attempt` (from 1) failed; None: give up.

        Args:
            alike: Number of consecutive attempts that failed in this way.
            left_s: Seconds left of the range's time limit. No attempt starts after them.
        """
        if attempt >= self.attempts or alike >= self.requests_for(error):
            return None
        # The exponent is bounded because 2.0**1024 overflows.
        wait = rng.random() * min(self.backoff_cap_s, self.backoff_s * 2.0 ** min(attempt - 1, 64))
        asked = getattr(error, "retry_after_s", None)
        if asked is not None:
            wait += min(max(asked, 0.0), _LONGEST_ASKED_S)
        return wait if wait < left_s else None
