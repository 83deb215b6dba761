"""The operators that every data set of ours has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.datasets.methods.batches import BatchMethods
from headrace.datasets.methods.inputs import InputMethods
from headrace.datasets.methods.order import OrderMethods
from headrace.datasets.methods.samples import SampleMethods
from headrace.datasets.operators.registered import made_operator

if TYPE_CHECKING:
    from headrace.datasets.stream import Stream


class Operators(OrderMethods, SampleMethods, BatchMethods, InputMethods):
    """The operators of every data set of ours. Each gives a new stream; none reads anything."""

    announced_epoch: tuple[int] | None = None  # another tuple each time that it is told

    def set_epoch(self, epoch: int) -> None:
        """Have the loader of this data set begin this epoch next, as its own `set_epoch` does."""
        self.announced_epoch = (epoch,)

    def apply_op(self, name: str, *args: Any, **named: Any) -> Stream:
        """What an operator does that was registered by `hr.register_operator`.

        Args:
            name: of the operator.
            *args: for what makes it.
            **named: the same, by name.

        Raises:
            OptionError: there is no such operator.
        """
        return self._with(made_operator(name, args, named))
