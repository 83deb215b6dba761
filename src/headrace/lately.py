"""torch, in processes that may never need it: whether it is there.

To import it takes a second and a hundred MB. Where a value can be a tensor only if somebody has imported torch, whoever
handles values asks here first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch


def torch_is_loaded() -> bool:
    """Whether this process has imported torch, or does so: else nothing in it is a tensor."""
    return "torch" in sys.modules


def when_torch_is_loaded(call: Callable[[], object]) -> None:
    """Call this now where torch is there, else as soon as it was imported, before whoever has imported it goes on."""
    if torch_is_loaded():
        call()
        return
    waiting = next((one for one in sys.meta_path if isinstance(one, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.calls.append(call)


class _Waiting(MetaPathFinder):
    """Finds torch as all others do, and calls what waits for it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        others = (one for one in sys.meta_path if one is not self)
        spec = next((spec for one in others if (spec := one.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:  # some only ask whether it could be imported
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        sys.meta_path.remove(self)
        for call in self.calls:
            call()


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
