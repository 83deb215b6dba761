"""A state that was edited differs from one that was stored in a file."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace.state.state import is_as_saved, whole_check

PLAIN = {"batches": 3, "sampler": None, "copies": [{"p": 7}]}
ANY = {**PLAIN, "copies": [{"p": np.int64(7), "of": {1, 2}}]}


@pytest.mark.parametrize(("state", "default"), [
    (PLAIN, None),
    ({**PLAIN, "copies": [{"p": np.int64(7)}]}, int),
    (ANY, lambda value: sorted(value) if isinstance(value, set) else int(value)),
])  # fmt: skip
def test_state_is_as_it_was_saved_after_a_file(state: dict[str, Any], default: Any) -> None:
    saved = {**state, "check": whole_check(state)}
    assert is_as_saved(saved)
    assert is_as_saved(json.loads(json.dumps(saved, default=default)))
    assert not is_as_saved({**saved, "batches": 4})
    assert not is_as_saved({name: value for name, value in saved.items() if name != "batches"})
