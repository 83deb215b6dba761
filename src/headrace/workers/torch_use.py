"""A search of the steps for uses of torch, before workers start."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from headrace._util.file_limits import sending
from headrace._util.functions import is_async
from headrace._util.shared_memory import close_all
from headrace.torch_compat.picklers import OutwardPacker
from headrace.workers.tasks import Step

_SEARCHED_BYTES = 1 << 20
_OURS_WITHOUT_TORCH = {
    "headrace",
    "headrace.ops.batch",
    "headrace.ops.filter",
    "headrace.ops.flat_map",
    "headrace.ops.map",
    "headrace.ops.select",
    "headrace.ops.tokenize",
    "headrace._util.functions",
    "headrace.torch_compat.by_value",
    "headrace.workers.randomness",
}


def may_use_torch(steps: Iterable[Step], functions: Iterable[object]) -> bool:
    """True if steps, or other functions that workers call, mention torch.

    A wrong answer costs time only: a worker imports torch when it needs it.
    """
    called = [step.fn for step in steps if not step.is_without_torch and not is_async(step.fn)]
    descriptors: list[int] = []
    search = _Search()
    try:
        with sending(descriptors):
            search.dump([*called, *functions])
    except Exception:  # too large to search, or not picklable, which is reported when it is sent
        return True
    finally:
        close_all(descriptors)
    return search.has_found or any(map(_names_torch, search.modules))


class _Search(OutwardPacker):
    """Pickles functions as for workers, and looks for torch in their modules and code."""

    def __init__(self) -> None:
        super().__init__(_Sink(), lambda _: None)
        self.has_found = False

    def reducer_override(self, obj: object) -> Any:
        code = obj.__code__ if isinstance(obj, FunctionType) else obj
        imports_torch = isinstance(code, CodeType) and "torch" in code.co_names
        self.has_found |= imports_torch or _top_of(type(obj)) == "torch"
        return super().reducer_override(obj)


class _Sink(io.BytesIO):
    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def write(self, piece: Any, /) -> int:
        self._count += len(piece)
        if self._count > _SEARCHED_BYTES:
            raise OverflowError
        return len(piece)


def _names_torch(module: str) -> bool:
    """True if a module is torch's, refers to torch, or is one of headrace's that may need torch."""
    top = module.partition(".")[0]
    if top in ("headrace", "__main__"):  # functions of a script are pickled by value, with their globals
        return top == "headrace" and module not in _OURS_WITHOUT_TORCH
    return top == "torch" or any(_top_of(value) == "torch" for value in vars(sys.modules.get(module, sys)).values())


def _top_of(value: object) -> str:
    is_module = isinstance(value, ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", None)  # type: ignore[attr-defined]
    return name.partition(".")[0] if isinstance(name, str) else ""
