"""Checksums of states; `docs/reference/state.md` specifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from headrace.types import Ints


def check_of(packed: Mapping[str, Any], last: Ints) -> str:
    """Hash a state, without its mark, and the numbers of the samples directly before it."""
    checked = {name: value for name, value in packed.items() if name not in ("check", "mark")}
    digest = hashlib.blake2b(json.dumps(checked, sort_keys=True).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(last, "<i8").tobytes())
    return digest.hexdigest()


def mark_check(mark: object) -> str | None:
    """Hash a mark. None if it is not JSON, as marks of user data sets may be."""
    try:
        plain = json.loads(json.dumps(mark))  # after a round trip, keys of dicts are text
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()


def whole_check(state: Mapping[str, Any]) -> str:
    """Hash a state without its `check`, and append the names of values that are not JSON."""
    left_out = {name for name, value in state.items() if name != "check" and _plain(value) is _NO_JSON}
    return "-".join([_hash_without(state, left_out), *sorted(left_out)])


def is_as_saved(state: Mapping[str, Any]) -> bool:
    """True if a state has no check, or matches it."""
    check = state.get("check")
    if not isinstance(check, str):
        return check is None
    digest, *left_out = check.split("-")
    return digest == _hash_without(state, set(left_out))


def _hash_without(state: Mapping[str, Any], left_out: AbstractSet[str]) -> str:
    plain = {name: _plain(value) for name, value in state.items() if name != "check" and name not in left_out}
    if _NO_JSON in plain.values():
        return ""
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


_NO_JSON = object()


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value, default=_number))
    except (TypeError, ValueError, RecursionError):
        return _NO_JSON


def _number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError
