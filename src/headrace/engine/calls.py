"""Calls from the engine to the trainer during an epoch. All other messages go one way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headrace.datasets.faces import IteratedData


class TrainerCalls(Protocol):
    """Callbacks of the trainer, called on the engine's loop."""

    def decide(self, error: BaseException) -> object:
        """Return the decision of the user's `on_error` on a failed sample, in order of delivery.

        An exception raised here replaces the batch.
        """
        ...

    def samples_of(self, data: IteratedData) -> Callable[[], AsyncIterator[object]]:
        """Return a factory of iterators over a data set whose `loop` is "caller".

        To be called at the start of an epoch, in the trainer's thread.

        Raises:
            OptionError: there is no such loop, or it cannot be reached from here.
        """
        ...
