"""Whether workers may come to need torch: what they do is looked at before they are started."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from headrace.functions import is_async
from headrace.tasks import Step
from headrace.work.uses_random import generators_of


def may_use_torch(steps: Iterable[Step], functions: Iterable[object]) -> bool:
    """Whether steps, or other functions that workers call, may import torch, or be sent something of it.

    Only what is wholly understood does not: what else there is to call could do so anywhere.
    """
    called = [step.fn for step in steps if not step.is_without_torch and not is_async(step.fn)]
    return any(_names_torch(one) or "torch" in generators_of(one) for one in (*called, *functions))


def _names_torch(function: object) -> bool:
    """Whether the module that workers import for a function has something of torch's."""
    home = getattr(function, "__module__", None) or type(function).__module__
    if home == "__main__":  # what is of the script goes by value
        return False
    values = vars(sys.modules[home]).values() if home in sys.modules else ()
    return any(_top_of(value) == "torch" for value in values)


def _top_of(value: object) -> str:
    """The top package of a module, or of what defines a class or function."""
    is_module = isinstance(value, type(sys))
    name = value.__name__ if is_module else getattr(value, "__module__", None)  # type: ignore[attr-defined]
    return name.partition(".")[0] if isinstance(name, str) else ""
