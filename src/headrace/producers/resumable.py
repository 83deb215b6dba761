"""An iterable data set that says how far it has come, and goes on from there."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any


class Resumable:
    """The samples of one epoch of an iterable data set, which may give states, and its iterator too.

    Args:
        dataset: may have `state_dict` and `load_state_dict`.
        samples: makes its iterator, which may have them too; told the number of the sample that it stands before, and
            how many epochs later it is than the one that is meant.
        state: what `snapshot` once gave, to go on from there. With "over" it is of the epoch before, which has ended
            since, and this is the number that the next sample had in that; "took" says how many that had, where ranks
            shared it.
        take: how many samples an epoch has at most; None: as many as there are.
        begin: the number of the first sample.
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
        """The iterator: the data set goes on first, then its iterator is made, then that goes on."""
        if "over" in self._state:
            return self._next_epoch()
        self._iterator = self._gone_on(self._begin, 0)
        return self._iterator  # type: ignore[no-any-return]

    def snapshot(self) -> dict[str, Any] | None:
        """How far it has come; None where neither says so."""
        if "over" in self._state:
            return copy.deepcopy(self._state)  # it is not begun yet
        state = {}
        if gives_state(self._dataset):
            state["dataset"] = copy.deepcopy(self._dataset.state_dict())
        if gives_state(self._iterator):
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
        """The data set is what the end of the epoch before has made of it: that is brought to its end once more."""
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
    """Whether a thing has states, by the names of torchdata's protocol."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
