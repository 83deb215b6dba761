"""torch's default_collate in process memory. `spec` and `slots` write it into a slab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import default_convert
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data.dataloader import default_collate

from headrace._util.functions import as_it_is
from headrace.torch_compat.serialize import LEAVES

__all__ = ["Single", "default_collate", "is_extended", "of_single", "plain_collate", "unchanged_by"]

_ORIGINAL_MAP = dict(default_collate_fn_map)


def is_extended() -> bool:
    """True if the user has registered collate functions with torch."""
    return default_collate_fn_map != _ORIGINAL_MAP


def plain_collate(samples: object) -> object:
    """Return torch's default_collate result in process memory, in workers too.

    In workers torch's own function puts tensors into new shared memory, from which headrace would have to copy them.
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
    # As torch's function in a worker: the batch has the first tensor's dtype.
    return torch.stack(tensors, 0, out=first.new_empty((len(tensors), *first.shape)))


class Single:
    """Applies a function to the only sample, in place of collation."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function = function

    def __call__(self, samples: list[object]) -> object:
        (sample,) = samples  # more than one would be lost
        return self.function(sample)


def of_single(function: Callable[[object], object]) -> Single | None:
    return None if function is as_it_is else Single(function)


def unchanged_by(collate: Callable[[list[object]], object] | None) -> Callable[[object], bool] | None:
    """Return a predicate for samples that a collation does not change. None if unknown."""
    is_known = isinstance(collate, Single) and collate.function is default_convert
    return is_data if is_known else None


def is_data(value: object, depth: int = 4) -> bool:
    """True for text, bytes and Python numbers, also in dicts and lists with little nesting."""
    parts: Any = value
    if type(value) in LEAVES:
        return True
    if type(value) not in (dict, list) or not depth:
        return False
    if type(value) is dict:
        if not LEAVES.issuperset(map(type, parts)):
            return False
        parts = parts.values()
    return LEAVES.issuperset(map(type, parts)) or all(is_data(part, depth - 1) for part in parts)
