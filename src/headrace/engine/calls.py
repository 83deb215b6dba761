"""What the engine asks of the trainer while an epoch runs; all else goes one way: jobs and plans in, deliveries out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headrace.datasets.faces import IteratedData


class TrainerCalls(Protocol):
    """Given to the engine by whoever hosts it, who may refuse what it cannot do; called on the engine's loop."""

    def decide(self, error: BaseException) -> object:
        """What the user's `on_error` says of a sample that has failed; one after the other, as they are delivered.

        What it raises is raised in the place of the batch.
        """
        ...

    def samples_of(self, data: IteratedData) -> Callable[[], AsyncIterator[object]]:
        """What makes an iterator over a data set whose `loop` is "caller"; called as an epoch begins, by who begins it.

        Raises:
            OptionError: there is no such loop, or nobody here can reach it.
        """
        ...
