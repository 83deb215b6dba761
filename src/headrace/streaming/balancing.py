"""Assignment of each global batch's samples to ranks by work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.datasets.planning import Planning
from headrace.errors import OptionError
from headrace.functions import name_of
from headrace.options import Balance
from headrace.plan import Order
from headrace.plan.balance import Work, dealt
from headrace.types import Ints

_POWERS = {"tokens": 1, "tokens^2": 2}


class Balancing:
    """Assigns the samples of a step to ranks. The number per rank does not change.

    Raises:
        OptionError: the balance is by tokens, and the lengths are known only after reading.
    """

    def __init__(self, balance: Balance, planning: Planning, order: Order) -> None:
        self._balance, self._planning, self._order = balance, planning, order
        if not isinstance(balance, str):
            return
        try:
            planning.work(np.zeros(0, np.int64), _POWERS[balance])
        except TypeError as error:
            raise OptionError(
                f"balance={balance!r} goes by how many tokens samples have, and {planning.pipeline.source.name} knows "
                "that only once they are read: give a function that makes an array of their work of one of their "
                "numbers; or .pack() them, where their lengths are known"
            ) from error

    def __call__(self, positions: Ints, sizes: Sequence[int]) -> Ints:
        """Return the rank of each position of a step. `sizes` are the numbers per rank."""
        return dealt(self._work(self._planning.numbers(self._order, positions)), sizes)

    def _work(self, numbers: Ints) -> Work:
        if isinstance(self._balance, str):
            return self._planning.work(numbers, _POWERS[self._balance])
        try:
            work = np.asarray(self._balance(numbers), np.float64)
        except Exception as error:
            error.add_note(f"balance={name_of(self._balance)} was asked for the work of {len(numbers)} samples")
            raise
        if work.shape != numbers.shape or not (np.isfinite(work) & (work >= 0)).all():
            raise OptionError(
                f"balance= is to give {len(numbers)} numbers of 0 or more, the work of each of so many samples, and "
                f"gave {work!r:.200}"
            )
        return work
