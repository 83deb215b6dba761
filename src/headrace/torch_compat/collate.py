"""torch's default_collate, in memory of the process; `spec` and `slots` have it written straight into a slab."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data.dataloader import default_collate

__all__ = ["default_collate", "is_extended", "plain_collate"]

_ORIGINAL_MAP = dict(default_collate_fn_map)


def is_extended() -> bool:
    """Whether the user has registered collate functions of their own with torch."""
    return default_collate_fn_map != _ORIGINAL_MAP


def plain_collate(samples: object) -> object:
    """What torch's default_collate gives, in a worker too, in memory of the process.

    torch's own function puts tensors into fresh shared memory there, and ours would have to be copied out of it again.
    """
    functions = dict(default_collate_fn_map)
    if functions.get(torch.Tensor) is _ORIGINAL_MAP[torch.Tensor]:
        functions[torch.Tensor] = _stack
    return collate(samples, collate_fn_map=functions)


def _stack(
    tensors: tuple[torch.Tensor, ...],
    *,
    collate_fn_map: Mapping[type | tuple[type, ...], Callable[..., object]] | None = None,
) -> torch.Tensor:
    first = tensors[0]
    if first.is_nested or first.layout is not torch.strided:
        made: torch.Tensor = _ORIGINAL_MAP[torch.Tensor](tensors, collate_fn_map=collate_fn_map)
        return made
    # As torch's function in a worker: the batch has the dtype of the first, whatever the others could be cast to.
    return torch.stack(tensors, 0, out=first.new_empty((len(tensors), *first.shape)))
