"""Small helpers that know no samples: shared memory, limits of the machine, validation, pickling."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_names(module: str, homes: Mapping[str, str]) -> tuple[list[str], Callable[[str], object]]:
    """Return a module's public names, and the function that imports one of them at its first use.

    Args:
        homes: The names, separated by spaces, by the module that defines them.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def imported(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(home_of[name]), name)

    return list(home_of), imported
