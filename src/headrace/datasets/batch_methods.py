"""The operators of data sets that put samples together."""

from __future__ import annotations

from typing import TypeVar

from headrace.datasets.operators import AddsOperators, Batch
from headrace.errors import OptionError

S = TypeVar("S")  # a stream


class BatchMethods(AddsOperators[S]):
    """How samples are put together."""

    def batch(self, n: int, *, drop_last: bool = False) -> S:
        """Batches of `n` samples, collated; a `map` behind it gets whole batches.

        Where more follows than functions of batches, such as `unbatch` or another `batch`, it is made on the way, by
        the default collation.

        Args:
            n: samples in a batch.
            drop_last: leave a last batch out that has fewer.
        """
        if n < 1:
            raise OptionError(f".batch({n}): a batch has 1 sample or more")
        return self._with(Batch(n, drop_last))
