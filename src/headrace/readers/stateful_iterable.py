"""Iterable data sets that save and resume their progress."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.errors import OptionError


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

    def snapshot(self) -> dict[str, Any] | None:
        """Return the progress. None if neither data set nor iterator has states."""
        if "over" in self._state:
            return copy.deepcopy(self._state)  # the epoch has not started yet
        state = {}
        if gives_state(self._dataset):
            state["dataset"] = copy.deepcopy(self._dataset.state_dict())
        if gives_state(self._iterator):
            try:
                state["iterator"] = copy.deepcopy(self._iterator.state_dict())
            except OptionError:  # one of its inputs has no state
                return None
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
        before = self._gone_on(number, -1)
        try:
            while take is None or number < take:
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


def gives_state(thing: object) -> bool:
    """True if an object implements torchdata's protocol of states."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
