"""Orders of an epoch, and the samples that they give."""

from collections.abc import Iterable, Sequence

import numpy as np

from headrace.order.orders import Order, ShardOrder, ShuffledOrder, Windows


def order_of(sizes: Sequence[int], by: str, key: Sequence[int], windows: Windows) -> Order:
    if by == "global":
        return ShuffledOrder(ShardOrder(np.array(sizes, np.int64), "none", ()), tuple(key))
    return ShardOrder(np.array(sizes, np.int64), by, tuple(key), windows)


def located(order: Order, positions: Iterable[int] | None = None) -> list[list[int]]:
    """(shard, row) at each position; at all of them by default."""
    where = np.arange(order.count) if positions is None else np.array(list(positions), np.int64)
    found: list[list[int]] = np.stack(order.locate(where), axis=1).tolist()
    return found
