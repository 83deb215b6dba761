"""Libraries of this package's extras, which may not be installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from headrace.errors import OptionError


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
