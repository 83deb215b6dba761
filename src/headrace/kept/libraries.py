"""Which modules are a library's, told by its version, and which are the user's own, told by what is in them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}


@functools.cache
def version_of(module: str) -> str | None:
    """The version of the library that a module, by its name, is of; None: it is the user's own."""
    top = module.partition(".")[0]
    if top == "__main__":
        return None
    found = sys.modules.get(top)
    if found is None:
        places = _places(top)
    else:
        places = [getattr(found, "__file__", None) or "", *getattr(found, "__path__", ())]
    if top in sys.builtin_module_names or (top in sys.stdlib_module_names and not _is_own(places)):
        return platform.python_version()
    if top != "headrace" and not any(_INSTALLED.intersection(Path(place).parts) for place in places):
        return None
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(top)
    version = getattr(found, "__version__", None)
    return version if type(version) is str else _dated(places)


def _is_own(places: list[str]) -> bool:
    """Whether a file of the user's stands in the place of a module of Python's, which has the same name."""
    of_python = Path(os.__file__).parent
    files = (Path(place) for place in places if place.endswith((".py", ".pyc")))
    return any(of_python not in (file.parent, *file.parents) for file in files)


def _places(top: str) -> list[str]:
    """Where a module would be imported from."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        return [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return []


def _dated(places: list[str]) -> str:
    """What tells a library that says no version: when its file was written."""
    with suppress(OSError):
        status = Path(places[0]).stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    return "unknown"


def is_by_name(value: object, module: str | None, name: str | None) -> bool:
    """Whether a library has this very value under its name."""
    if not module or not name or version_of(module) is None:
        return False
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value
