"""Assignment of a step's samples to ranks, with equal counts and balanced work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.types import Ints

Work = NDArray[np.float64]

_CLOSE = 1e-4  # of the mean work: smaller differences are ignored
_SWAPS = 8  # maximum, per rank


def dealt(work: Work, sizes: Sequence[int]) -> Ints:
    """Return the rank of each sample. Deterministic.

    Samples are assigned in order of decreasing work, each to the rank with the least work and a free place. Then the
    ranks with the most and the least work exchange samples while that reduces their difference.
    """
    ranks = np.empty(len(work), np.int64)
    loads = [(0.0, rank) for rank in range(len(sizes)) if sizes[rank]]
    left = list(sizes)
    for sample in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        ranks[sample] = rank
        left[rank] -= 1
        if left[rank]:
            heapq.heappush(loads, (load + float(work[sample]), rank))
    _exchange(work, ranks, len(sizes))
    return ranks


def _exchange(work: Work, ranks: Ints, world: int) -> None:
    loads = np.bincount(ranks, work, world)
    taking = np.flatnonzero(np.bincount(ranks, minlength=world))
    for _ in range(_SWAPS * world):
        most, least = taking[loads[taking].argmax()], taking[loads[taking].argmin()]
        gap = loads[most] - loads[least]
        if gap <= _CLOSE * loads.mean():
            return
        mine, others = np.flatnonzero(ranks == most), np.flatnonzero(ranks == least)
        one, other = _pair(work[mine], work[others], gap / 2)
        moved = work[mine[one]] - work[others[other]]
        if not 0 < moved < gap:
            return
        ranks[mine[one]], ranks[others[other]] = least, most
        loads[most] -= moved
        loads[least] += moved


def _pair(mine: Work, others: Work, wanted: float) -> tuple[int, int]:
    """Return the samples of both ranks whose difference in work is closest to `wanted`."""
    ascending = np.argsort(others, kind="stable")
    at = np.clip(np.searchsorted(others[ascending], mine - wanted), 0, len(others) - 1)
    choices = np.stack([at, np.maximum(at - 1, 0)])
    distance = np.abs(mine - others[ascending[choices]] - wanted)
    which, one = np.unravel_index(distance.argmin(), distance.shape)
    return int(one), int(ascending[choices[which, one]])
