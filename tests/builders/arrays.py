"""Files as numpy and torch save them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np


def saved(save: Callable[..., object], *values: Any, **named: Any) -> bytes:
    """Arrays as written by `save` (np.save, np.savez or np.savez_compressed)."""
    save(out := io.BytesIO(), *values, **named)
    return out.getvalue()


def npy(array: Any) -> bytes:
    return saved(np.save, array)
