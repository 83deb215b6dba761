"""torchcodec, which decodes by FFmpeg's shared libraries."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import OptionError


def torchcodec_decoders(instead: str) -> Any:
    """The module `torchcodec.decoders`.

    Args:
        instead: what could be done without it.

    Raises:
        OptionError: it does not load; the message says what it needs.
    """
    try:
        return importlib.import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise OptionError(
            f"torchcodec does not load ({first}): it needs FFmpeg's shared libraries, and a build for the torch that "
            f"is here, which of PyPI's for a torch without CUDA is torchcodec==0.13.*; {instead}"
        ) from error
