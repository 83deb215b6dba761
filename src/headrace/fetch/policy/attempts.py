"""Requests for one range until it is complete: attempts, waits, and the final error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from headrace.errors import ReadTimeoutError, StorageError
from headrace.fetch.meter import Meter
from headrace.fetch.policy.endpoint import Endpoint, ReadFailure, close
from headrace.fetch.policy.limits import Semaphore
from headrace.fetch.policy.range_request import DeadlineTimer, RangeRequest
from headrace.fetch.policy.retry import RetryPolicy
from headrace.fetch.stores.addresses import host_of, is_local, panic_in
from headrace.options import Fetch
from headrace.types import Store

_MANY_HOSTS = 512


class _OurMemory:
    """Memory that a read waits for. Such a wait never counts against the store."""

    succeeded_at = float("inf")


_OUR_MEMORY = _OurMemory()


class Attempts:
    """The requests of one reader. `clock` gives monotonic seconds, `rng` the random waits."""

    def __init__(
        self,
        options: Fetch,
        concurrency: int,
        meter: Meter,
        clock: Callable[[], float],
        rng: random.Random,
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
                self._everyone,
                self._concurrency,
                self._options,
                self._meter,
                self._clock,
                is_far=not is_local(store),
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
            request.waits_for = _OUR_MEMORY
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
        request.waits_for = endpoint
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
