"""Stage 1 of 4: maps (seed, epoch, position) to a sample. Pure: no reads, no hidden state."""

from headrace.order.cursor import Cursor
from headrace.order.orders import (
    ChosenOrder,
    ComputedOrder,
    EpochOrder,
    FirstOf,
    Order,
    Passes,
    Places,
    ShardOrder,
    ShuffledOrder,
)
from headrace.order.permutation import draw, permutation, sample_seed, window_order
from headrace.order.steps import Steps, share
from headrace.order.windows import Windows

__all__ = [
    "ChosenOrder",
    "ComputedOrder",
    "Cursor",
    "EpochOrder",
    "FirstOf",
    "Order",
    "Passes",
    "Places",
    "ShardOrder",
    "ShuffledOrder",
    "Steps",
    "Windows",
    "draw",
    "permutation",
    "sample_seed",
    "share",
    "window_order",
]
