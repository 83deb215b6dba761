"""By what a state is known to be as it was saved; `docs/reference/state.md` specifies it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.types import Ints


def check_of(packed: Mapping[str, Any], last: Ints) -> str:
    """A hash of a state and of the numbers of the samples right before it; not of a mark, which has one of its own."""
    checked = {name: value for name, value in packed.items() if name not in ("check", "mark")}
    digest = hashlib.blake2b(json.dumps(checked, sort_keys=True).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(last, "<i8").tobytes())
    return digest.hexdigest()


def mark_check(mark: object) -> str | None:
    """A hash of a mark; None: it is no JSON, as what a data set gives may be."""
    try:
        plain = json.loads(json.dumps(mark))  # names in others' dicts are texts when they come back from a file
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()


def whole_check(state: Mapping[str, Any]) -> str:
    """Return a hash of a state without its `check`. Values that are no JSON are left out: data sets may give any."""
    plain = {name: _plain(value) for name, value in state.items() if name != "check"}
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value, skipkeys=True, default=lambda _: None))
    except (ValueError, RecursionError):
        return None
