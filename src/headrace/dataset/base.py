"""The operators of every headrace data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.dataset.methods.batches import BatchMethods
from headrace.dataset.methods.inputs import InputMethods
from headrace.dataset.methods.order import OrderMethods
from headrace.dataset.operators import SampleMethods

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream


class Operators(OrderMethods, SampleMethods, BatchMethods, InputMethods):
    """The operators of every headrace data set. Each returns a new stream; none reads anything."""

    announced_epoch: tuple[int] | None = None  # a new tuple for each call, so that a repeated epoch is noticed

    def set_epoch(self, epoch: int) -> None:
        """Make the loader of this data set start this epoch next, like the loader's own `set_epoch`."""
        self.announced_epoch = (epoch,)

    def apply_op(self, name: str, *args: Any, **named: Any) -> Stream:
        """Apply an operator registered by `hr.register_operator`.

        Args:
            name: Name of the operator.
            *args: Positional arguments of the registered function.
            **named: Keyword arguments of the registered function.

        Raises:
            OptionError: There is no such operator.
        """
        from headrace.ops.registry import made_operator

        return self._with(made_operator(name, args, named))
