"""Which functions make workers start with torch: those that mention it, or that nobody can search."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from naming import name_of

import headrace as hr
from headrace.ops.map import FieldMap
from headrace.workers.chains import may_use_torch
from headrace.workers.tasks import Step


def without_torch(source: str) -> Callable[..., Any]:
    """The function `fn` of a module that is sent by value, and has headrace and numpy alone."""
    module = types.ModuleType("without_torch")
    module.__dict__.update(hr=hr, np=np)
    exec(source, module.__dict__)
    return module.fn  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def module_is_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("without_torch")
    monkeypatch.setitem(sys.modules, "without_torch", module)
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


DRAWS = "def fn(sample): return sample + hr.rng().random()"
IMPORTS = "def fn(sample):\n    import torch\n    return torch.zeros(1)"
IMPORTS_INSIDE = "def fn(sample):\n    def inner():\n        import torch\n    return inner()"
CALLS_ANOTHER = "def helper():\n    import torch\ndef fn(sample): helper()"
HOLDS_ARRAY = "class Scale:\n    by = np.ones(3)\n    def __call__(self, x): return x * self.by\nfn = Scale()"

NEED_TORCH: dict[str, Any] = {
    "imports torch": without_torch(IMPORTS),
    "has a function that imports torch": without_torch(IMPORTS_INSIDE),
    "calls a function that imports torch": without_torch(CALLS_ANOTHER),
    "is for a field": FieldMap(without_torch(IMPORTS), "x"),
    "is torch's": torch.zeros,
    "holds a type from torch": functools.partial(without_torch(DRAWS), torch.float64),
    "holds a tensor": functools.partial(without_torch(DRAWS), torch.zeros(1)),
    "is headrace's": may_use_torch,
    "holds too much": functools.partial(without_torch(DRAWS), [f"{k:0100}" for k in range(20_000)]),
    "cannot be pickled": threading.Lock().acquire,
}
NEED_NONE: dict[str, Any] = {
    "draws": without_torch(DRAWS),
    "holds an array": without_torch(HOLDS_ARRAY),
    "is for a field": FieldMap(without_torch(DRAWS), "x"),
    "has arguments": functools.partial(without_torch(DRAWS), 3),
    "is Python's": str.upper,
    "is numpy's": np.sqrt,
    "is of a module without torch": name_of,
}


@pytest.mark.parametrize(("function", "is_found"), [
    *(pytest.param(function, True, id=f"torch: {name}") for name, function in NEED_TORCH.items()),
    *(pytest.param(function, False, id=f"none: {name}") for name, function in NEED_NONE.items()),
])  # fmt: skip
def test_torch_is_found_in_a_function_that(function: Any, is_found: bool) -> None:
    assert may_use_torch([Step("map", "map", function)], ()) is is_found
    assert may_use_torch([], (None, function)) is is_found
    assert not may_use_torch([Step("open", "map", function, is_without_torch=True)], ())
