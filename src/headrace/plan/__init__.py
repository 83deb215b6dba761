"""Stage 1 of 4: takes (seed, epoch, position), gives which sample comes; pure, no reads, no hidden state."""

from headrace.plan.order import draw, permutation, sample_seed, window_order

__all__ = ["draw", "permutation", "sample_seed", "window_order"]
