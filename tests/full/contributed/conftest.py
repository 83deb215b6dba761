"""Operators that tests register are removed: others draw from all registered ones."""

from __future__ import annotations

import pytest

from headrace.ops import registry as registered


@pytest.fixture(autouse=True)
def own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))
