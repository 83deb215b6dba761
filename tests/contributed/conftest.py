"""What the operators of others' tests have in common."""

from __future__ import annotations

import pytest

from headrace.datasets import registered


@pytest.fixture(autouse=True)
def _registered_for_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is not known to the next one, which may draw from all that is."""
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))
