"""torch's default_collate for workers, most of which never call it: they write samples into slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def collate_by_torch(samples: list[Any]) -> object:
    """What torch's default_collate gives; torch is loaded at the first call."""
    from torch.utils.data import default_collate

    return default_collate(samples)


def for_workers(collate: Callable[[list[Any]], object] | None) -> Callable[[list[Any]], object] | None:
    """A function that does the same, and can be sent to a worker without torch."""
    from torch.utils.data import default_collate

    return collate_by_torch if collate is default_collate else collate
