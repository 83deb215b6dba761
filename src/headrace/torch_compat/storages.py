"""How values of torch's own types travel to workers that pickle does not take, or makes something else of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper as WrappedPipe

__all__ = ["REDUCERS", "WrappedPipe", "of_wrapped_pipe", "typed_storage"]

_Reduced = tuple[object, ...]


def _of_tensor(_: object) -> None:
    """As pickle does it."""


def _of_storage(storage: torch.UntypedStorage) -> _Reduced | None:
    if storage.device.type != "cpu":
        return None
    return _storage, (torch.empty(0, dtype=torch.uint8).set_(storage),)


def _storage(flat: torch.Tensor) -> torch.UntypedStorage:
    found = flat.untyped_storage()
    return found if found.nbytes() == flat.numel() else flat.clone().untyped_storage()


def _of_typed_storage(storage: torch.TypedStorage) -> _Reduced:
    return typed_storage, (storage._untyped_storage, storage.dtype)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """A typed storage over the same memory."""
    kind: Any = torch.TypedStorage
    made: torch.storage.TypedStorage = kind(wrap_storage=storage, dtype=dtype, _internal=True)
    return made


def _of_limits(found: torch.finfo | torch.iinfo) -> _Reduced:
    return type(found), (getattr(torch, found.dtype),)


def of_wrapped_pipe(wrapper: Any) -> _Reduced:
    """What is pickled for a data pipe, which it would pickle by itself, and without what cloudpickle can do."""
    return type(wrapper), (wrapper._datapipe,)


REDUCERS: dict[type, Callable[[Any], _Reduced | None]] = {
    torch.Tensor: _of_tensor,
    torch.UntypedStorage: _of_storage,
    torch.TypedStorage: _of_typed_storage,
    torch.finfo: _of_limits,
    torch.iinfo: _of_limits,
}
"""What is pickled for their instances, as `__reduce_ex__` gives it."""
