"""torch, in processes that may never need it: whether it is there.

To import it takes a second and a hundred MB. Where a value can be a tensor only if somebody has imported torch, whoever
handles values asks here first.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch


def torch_is_loaded() -> bool:
    """Whether this process has imported torch, or does so: else nothing in it is a tensor."""
    return "torch" in sys.modules


_tensor_types: tuple[type[torch.Tensor], ...] = ()


def tensor_types() -> tuple[type[torch.Tensor], ...]:
    """The type of tensors; none where there can be none yet."""
    global _tensor_types
    if not _tensor_types and torch_is_loaded():
        import torch

        _tensor_types = (torch.Tensor,)
    return _tensor_types


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of torch's own class."""
    return type(value) in tensor_types()
