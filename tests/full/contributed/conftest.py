"""What tests register is theirs alone: others draw from all operators that are registered."""

from __future__ import annotations

import pytest

from headrace.ops import registry as registered


@pytest.fixture(autouse=True)
def own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))
