"""Samples from an iterator, and iterable data sets that save and resume their progress."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import anyio

from headrace._util.context import RunningSample, is_ours, running_charge, running_sample
from headrace.readers.by_key import Charge, Expectation
from headrace.readers.protocol import Flow
from headrace.torch_compat.stateful import is_stateful
from headrace.types import Ranges
from headrace.workers.failures import ErrorPacker, Failure

if TYPE_CHECKING:
    from headrace.readers.sequential import ShuffleBuffer


class Resumable:
    """The samples of one epoch of an iterable data set.

    Args:
        dataset: May have `state_dict` and `load_state_dict`.
        samples: Makes the iterator, which may have these methods too. Called with the number of its first sample, and
            the number of epochs after the planned one.
        state: An earlier result of `snapshot` to resume from. With "over" it belongs to the previous epoch, which has
            ended since; its value is the number of that epoch's next sample. "took" is the number of samples of that
            epoch, if ranks shared it.
        take: Maximum number of samples in an epoch. None: no limit.
        begin: Number of the first sample.
    """

    def __init__(
        self,
        dataset: Any,
        samples: Callable[[int, int], AsyncIterator[object]],
        state: dict[str, Any] | None,
        take: int | None = None,
        begin: int = 0,
    ) -> None:
        self._dataset, self._samples, self._state, self._take = dataset, samples, state or {}, take
        self._begin = begin
        self._iterator: Any = None

    def open(self) -> AsyncIterator[object]:
        """Resume the data set, then make its iterator, then resume the iterator."""
        if "over" in self._state:
            return self._next_epoch()
        self._iterator = self._gone_on(self._begin, 0)
        return self._iterator  # type: ignore[no-any-return]

    def snapshot(self) -> dict[str, Any] | Callable[[], dict[str, Any]] | None:
        """Return the progress, or a function that returns it. None if neither data set nor iterator has states.

        An iterator of ours whose state takes long to make has `__snapshot__`, which returns such a function.
        """
        if "over" in self._state:
            return copy.deepcopy(self._state)  # the epoch has not started yet
        if hasattr(self._iterator, "__snapshot__"):
            later = self._iterator.__snapshot__()
            return lambda: {"iterator": later()}
        state = {}
        if is_stateful(self._dataset):
            state["dataset"] = copy.deepcopy(self._dataset.state_dict())
        if is_stateful(self._iterator):
            state["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return state or None

    def _gone_on(self, number: int, later: int) -> Any:
        if "dataset" in self._state:
            self._dataset.load_state_dict(copy.deepcopy(self._state["dataset"]))
        iterator: Any = self._samples(number, later)
        if "iterator" in self._state:
            iterator.load_state_dict(copy.deepcopy(self._state["iterator"]))
        return iterator

    async def _next_epoch(self) -> AsyncIterator[object]:
        """Repeat the previous epoch to its end, which prepares the data set, then start this one."""
        number, take = self._state["over"], self._state.get("took", self._take)
        before, is_begun = self._gone_on(number, -1), False
        try:
            while take is None or number < take or not is_begun:  # the first sample applies the loaded state
                is_begun = True
                await anext(before)
                number += 1
        except StopAsyncIteration:
            pass
        finally:
            await _close(before)
        self._state = {}
        self._iterator = self._samples(0, 0)
        try:
            async for sample in self._iterator:
                yield sample
        finally:
            await _close(self._iterator)


async def _close(iterator: object) -> None:
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


class IterProducer:
    """Emits samples of an asynchronous iterator.

    An iterator of ours may have `__next_several__(n)`, which returns 1 to n samples, or raises as `__anext__` does.
    No snapshot is taken at the end, as an exhausted data set may have prepared for the next epoch.

    Args:
        snapshot: Returns the state of the iteration, or None if there is none.
        take: Maximum number of samples, skipped ones included.
        begin: Position in the epoch of the first sample.
        done: Samples to skip, numbered from `begin`.
        chunk: Samples per chunk. Chunks end where batches end.
    """

    def __init__(
        self,
        samples: Callable[[], AsyncIterator[object]],
        *,
        snapshot: Callable[[], object] | None,
        take: int | None,
        buffer: ShuffleBuffer | None,
        begin: int,
        done: Ranges,
        batch_size: int,
        chunk: int,
        pack_error: ErrorPacker,
    ) -> None:
        self._samples, self._snapshot, self._take, self._buffer = samples, snapshot, take, buffer
        self._begin, self._done = begin, deque(done)
        self._batch_size, self._chunk, self._pack_error = batch_size, chunk, pack_error
        self._expected = Expectation()
        self._number = 0  # of the next sample, counted from `begin`, skipped ones included
        self._snapshots: deque[tuple[int, object]] = deque()
        self._waiting: list[object] = []  # samples in the buffer

    def mark(self, position: int) -> tuple[object, int] | None:
        """Return the last snapshot before a sample, and the number of the first sample after it."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= position:
            self._snapshots.popleft()
        if not self._snapshots:
            return None
        at, state = self._snapshots[0]
        return None if state is None else (state, at)

    async def run(self, flow: Flow) -> None:
        iterator = self._samples()
        position, is_over = 0, False
        self._take_snapshot()
        try:
            while not is_over:
                count = min(self._chunk, self._batch_size - position % self._batch_size)
                expected = self._expected.of(count)
                charge = Charge(flow, await flow.turn(expected, position), expected, position)
                running_charge.set(charge)
                samples, is_over = await self._some(iterator, count, flow.key)
                part = flow.part_of(samples, charge.claim)
                self._expected.learn(part, charge.charged)
                flow.put(position, part)
                position += len(samples)
                del samples
                if not is_over:
                    self._take_snapshot()
        finally:
            with anyio.CancelScope(shield=True):
                await _close(iterator)

    def _take_snapshot(self) -> None:
        is_end = self._number and self._take is not None and self._number >= self._take
        if self._snapshot is not None and not is_end:
            self._snapshots.append((self._number, self._snapshot()))

    async def _some(self, iterator: AsyncIterator[object], count: int, key: int) -> tuple[list[object], bool]:
        """Return (the next samples, True if they are the last)."""
        samples: list[object] = []
        try:
            while len(samples) < count:
                left = count if self._take is None else self._take - self._number
                if left <= 0:
                    return self._last(samples), True
                running_sample.set(RunningSample(key, self._begin + self._number))
                several = getattr(iterator, "__next_several__", None) if self._number else None
                wanted = min(left, count - len(samples))
                for sample in [await anext(iterator)] if several is None else await several(wanted):
                    number, self._number = self._number, self._number + 1
                    if not self._done or not self._is_done(number):
                        if self._buffer is None:
                            samples.append(sample)
                        else:
                            self._let_in(sample, samples, self._buffer)
                if self._number == 1:  # the earlier snapshot may belong to the end of the previous epoch
                    self._take_snapshot()
                if type(sample) is Failure and samples and samples[-1] is sample:
                    return samples, False  # the result of its batch may be settled now
        except StopAsyncIteration:
            return self._last(samples), True
        except BaseException as error:
            if is_ours(error):
                raise
            error.add_note(f"stage: fetch; sample {self._begin + self._number} of the epoch")
            self._take_snapshot()
            return [*self._last(samples), Failure(self._pack_error(error).widened())], True
        return samples, False

    def _is_done(self, number: int) -> bool:
        while self._done and self._done[0][1] <= number:
            self._done.popleft()
        return bool(self._done) and number >= self._done[0][0]

    def _let_in(self, sample: object, samples: list[object], buffer: ShuffleBuffer) -> None:
        slot = buffer.slot()
        if slot is None:
            self._waiting.append(sample)
        else:
            samples.append(self._waiting[slot])
            self._waiting[slot] = sample

    def _last(self, samples: list[object]) -> list[object]:
        if self._buffer is None:
            return samples
        order = self._buffer.end()
        waiting, self._waiting = self._waiting, []
        return samples + [waiting[k] for k in order.tolist()]
