"""Operators, formats and decoders that a test registers or installs are its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from headrace.formats import decoders
from headrace.formats import registry as formats
from headrace.ops import registry as operators

REGISTRIES = (operators, formats, decoders)


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
        registry._installed.cache_clear()
    yield
    for registry in REGISTRIES:
        registry._installed.cache_clear()


@pytest.fixture
def install(own_registries: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a package with such entry points known to a registry."""

    def installed(registry: ModuleType, *entries: tuple[str, str]) -> None:
        points = [importlib.metadata.EntryPoint(name, value, "headrace") for name, value in entries]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry._installed.cache_clear()

    return installed
