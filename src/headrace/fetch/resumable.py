"""An iterable data set that says how far it has come, and goes on from there."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any


class Resumable:
    """The samples of one epoch of an iterable data set, which may give states, and its iterator too.

    Args:
        dataset: may have `state_dict` and `load_state_dict`.
        samples: makes its iterator, which may have them too.
        state: what `snapshot` once gave, to go on from there.
    """

    def __init__(self, dataset: Any, samples: Callable[[], AsyncIterator[Any]], state: dict[str, Any] | None) -> None:
        self._dataset, self._samples, self._state = dataset, samples, state
        self._iterator: Any = None

    def open(self) -> AsyncIterator[Any]:
        """The iterator: the data set goes on first, then its iterator is made, then that goes on."""
        state = self._state or {}
        if "dataset" in state:
            self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._iterator = self._samples()
        if "iterator" in state:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))
        return self._iterator  # type: ignore[no-any-return]

    def snapshot(self) -> dict[str, Any] | None:
        """How far it has come; None where neither says so."""
        state = {}
        if gives_state(self._dataset):
            state["dataset"] = copy.deepcopy(self._dataset.state_dict())
        if gives_state(self._iterator):
            state["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return state or None


def gives_state(thing: Any) -> bool:
    """Whether a thing has states, by the names of torchdata's protocol."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
