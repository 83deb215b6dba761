"""One host as a reader knows it: how much it takes, how fast it is, and what is being asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import StorageError, ThrottledError
from headrace.fetch.meter import Meter
from headrace.fetch.policy.goal import Goal
from headrace.fetch.policy.hedge import Hedges
from headrace.fetch.policy.level import Level
from headrace.fetch.policy.retry import Quota
from headrace.fetch.policy.turns import Gate
from headrace.options import FetchOptions
from headrace.types import Answer, Store

Failure = StorageError | OSError

_WON = "the second request was answered first"
_NEVER = float("inf")


class Host:
    """One store: requests to it, with their second ones, and what their ends teach.

    Args:
        store: whom to ask.
        everyone: the gate of all the reader's requests.
        bound: requests at once while all is well.
        options: how many second requests may be made.
        meter: where to count.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        everyone: Gate,
        bound: int,
        options: FetchOptions,
        meter: Meter,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.level = Level(bound, clock)
        self.quota = Quota(clock)
        is_far = not getattr(store, "is_local", False)  # a disk is not made faster by being asked twice
        self.hedges = Hedges(options.hedge_share) if options.hedge_share and is_far else None
        self.succeeded_at = clock()
        self._everyone, self._meter, self._clock = everyone, meter, clock
        self._asking: dict[Asking, None] = {}
        self._seconds: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost when it is forgotten."""
        return not self.level.inside and self.level.is_free

    def try_enter(self) -> bool:
        """Be among the requests under way, if that needs no waiting."""
        everyone = self._everyone
        if not everyone.has_room or not self.level.try_enter():
            return False
        everyone.inside += 1
        return True

    async def enter(self, *, again: bool = False) -> None:
        """Be among the requests under way."""
        await self.level.enter(again=again)
        try:
            await self._everyone.enter(again=again)
        except asyncio.CancelledError:
            self.level.leave()
            raise

    def leave(self) -> None:
        """A request has ended."""
        self.level.leave()
        self._everyone.leave()

    def succeeded(self, *, again: bool) -> None:
        """A request was answered in full, at once or after attempts that failed."""
        self.succeeded_at = now = self._clock()
        self.level.succeeded(now)
        self.quota.give(1.0 if again else 0.1)

    def failed(self, error: Failure, began: float) -> Failure:
        """A request that began at `began` failed; gives the error back."""
        throttled = isinstance(error, ThrottledError)
        if throttled or isinstance(error, TimeoutError):
            self.level.overloaded(began, throttled=throttled)
            meter = self._meter
            meter.throttled += throttled
            meter.level = int(self.level.limit)
            meter.lowest_level = min(meter.lowest_level or meter.level, meter.level)
        return error

    async def ask(self, path: str, goal: Goal, began: float) -> Answer:
        """The answer for what is missing of `goal`, or for a second request that was faster."""
        if self.hedges is None:
            return await self.store.get(path, goal.asked_start, goal.asked_stop, if_match=goal.if_match)
        asking = Asking(path, goal, began)
        self._asking[asking] = None
        try:
            answer = await self.store.get(path, goal.asked_start, goal.asked_stop, if_match=goal.if_match)
        except asyncio.CancelledError:
            if goal.stopped_by != _WON or goal.settle() is None:
                raise
            answer = asking.take()
            self._meter.hedges_won += 1
        except (StorageError, OSError) as error:
            if asking.second is None or not asking.is_asked_again:
                raise  # the second request may be waiting for our own place
            asking.first_failed = True
            await asyncio.wait([asking.second])
            if asking.answer is None:
                if isinstance(asking.failure, StorageError) and asking.failure.retry_after_s:
                    raise asking.failure from error  # of the two the one that says when to come back
                raise
            self.failed(error, began)
            answer = asking.take()
            self._meter.hedges_won += 1
        finally:
            self._asking.pop(asking, None)
            if asking.second is not None:
                asking.second.cancel()
                asking.second = asking.failure = None
                await asking.dispose()
        self.hedges.learn(self._clock() - began)
        return answer

    def due(self, began: float) -> float:
        """When a request that began at `began` is late."""
        return _NEVER if self.hedges is None else began + self.hedges.delay_s

    def hedge(self, now: float) -> float:
        """Make the second requests that are due; gives when to look again."""
        assert self.hedges is not None
        late = []
        again = _NEVER
        for asking in self._asking:
            again = self.due(asking.began)
            if again > now:
                break
            late.append(asking)
            again = now + self.hedges.delay_s
        for asking in late:
            if not self.level.is_free or not self.hedges.take():
                break
            del self._asking[asking]
            asking.second = asyncio.get_running_loop().create_task(self._ask_again(asking))
            self._seconds.add(asking.second)
            asking.second.add_done_callback(self._seconds.discard)
        return again

    async def aclose(self) -> None:
        """Wait until the second requests that lost are gone, and end the timers."""
        self.level.close()
        self.quota.close()
        for second in self._seconds:
            second.cancel()
        await asyncio.gather(*self._seconds, return_exceptions=True)

    async def _ask_again(self, asking: Asking) -> None:
        goal, meter = asking.goal, self._meter
        if not self.try_enter():
            await self.enter(again=True)
        asking.is_asked_again = True
        began = self._clock()
        meter.begin(began)
        meter.hedges += 1
        try:
            asking.answer = await self.store.get(asking.path, goal.asked_start, goal.asked_stop, if_match=goal.if_match)
        except (StorageError, OSError) as error:
            asking.failure = self.failed(error, began)
            return
        finally:
            meter.end(self._clock())
            self.leave()
        if asking.second is None:
            await asking.dispose()
        elif not asking.first_failed:
            goal.interrupt(_WON)


class Asking:
    """A request whose first byte has not come yet, and its second one."""

    __slots__ = ("answer", "began", "failure", "first_failed", "goal", "is_asked_again", "path", "second")

    def __init__(self, path: str, goal: Goal, began: float) -> None:
        self.path, self.goal, self.began = path, goal, began
        self.second: asyncio.Task[None] | None = None
        self.answer: Answer | None = None
        self.failure: Failure | None = None
        self.first_failed = self.is_asked_again = False

    def take(self) -> Answer:
        """The second request's answer, which is the one that counts."""
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer

    async def dispose(self) -> None:
        """Nobody wants the second request's answer."""
        answer, self.answer = self.answer, None
        if answer is not None:
            await close(answer)


async def close(answer: Answer) -> None:
    """Read no more of it."""
    aclose = getattr(answer.chunks, "aclose", None)
    if aclose is not None:
        await aclose()
