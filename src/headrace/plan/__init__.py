"""Stage 1 of 4: maps (seed, epoch, position) to a sample. Pure: no reads, no hidden state."""

from headrace.plan.cursor import Cursor
from headrace.plan.lanes import Windows
from headrace.plan.order import (
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
from headrace.plan.permutation import draw, permutation, sample_seed, window_order
from headrace.plan.steps import Steps, share

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
