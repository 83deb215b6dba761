"""Libraries that are imported when needed: those of extras, and torch, which takes a second and 100 MB.

A value can be a tensor only if torch is imported already.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from headrace.errors import OptionError

if TYPE_CHECKING:
    import torch


def torch_is_loaded() -> bool:
    """True if torch is imported or being imported. Otherwise no value is a tensor."""
    return "torch" in sys.modules


def when_torch_is_loaded(call: Callable[[], object]) -> None:
    """Call `call` now if torch is imported, else directly after its import."""
    if torch_is_loaded():
        call()
        return
    waiting = next((one for one in sys.meta_path if isinstance(one, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.calls.append(call)


class _Waiting(MetaPathFinder):
    """Meta path finder that wraps torch's loader and then runs the pending calls."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        others = (one for one in sys.meta_path if one is not self)
        spec = next((spec for one in others if (spec := one.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:  # some callers only check whether torch is installed
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        sys.meta_path.remove(self)
        for call in self.calls:
            call()


_tensor_types: tuple[type[torch.Tensor], ...] = ()


def tensor_types() -> tuple[type[torch.Tensor], ...]:
    global _tensor_types
    if not _tensor_types and torch_is_loaded():
        import torch

        _tensor_types = (torch.Tensor,)
    return _tensor_types


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """True for a plain `torch.Tensor`. Subclasses do not count."""
    return type(value) in tensor_types()


def needed(module: str, extra: str, user: str = "it", kind: type[Exception] = OptionError) -> Any:
    """Import a library that `user` needs. The error, of type `kind`, has the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise kind(f"{user} needs {name}, which is not installed; try: pip install 'headrace[{extra}]'") from None


@functools.cache
def if_installed(module: str) -> Any:
    """Import a library. None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
