"""Stores that others add: they are asked for their scheme, and shadow none of ours."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

import headrace as hr
from headrace.fetch import Reader
from headrace.fetch.stores import addresses as registry
from headrace.types import Answer


class Echo:
    """A store whose objects are what they are asked by."""

    def __init__(self, root: str, storage_options: Mapping[str, Any]) -> None:
        self._about = f"{root} {sorted(storage_options)}"

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        body = f"{path} of {self._about}".encode()
        return Answer(0, len(body), len(body), None, self._one(body))

    async def _one(self, body: bytes) -> AsyncIterator[bytes]:
        yield body

    async def aclose(self) -> None: ...


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.mark.asyncio
async def test_registered_scheme_is_read_by_its_store() -> None:
    hr.plugins.register_store("echo", Echo)
    async with Reader(concurrency=1, storage_options={"colour": 1}) as reader:
        assert await reader.read("echo://place/a/b?c") == b"a/b?c of echo://place ['colour']"


class Here(Echo):
    is_local = True


@pytest.mark.parametrize(("store", "kept"), [(Here, 0), (Echo, 1)], ids=["local", "far"])
def test_local_registered_store_is_not_cached(tmp_path: Path, store: type[Echo], kept: int) -> None:
    async def read() -> None:
        async with Reader(hr.Fetch(cache_dir=tmp_path), concurrency=1) as reader:
            await reader.read("echo://place/a")

    hr.plugins.register_store("echo", store)
    asyncio.run(read())
    assert len(list(tmp_path.rglob("*.range"))) == kept


@pytest.mark.asyncio
async def test_registered_scheme_wins_over_fsspec() -> None:
    assert fsspec.get_filesystem_class("ftp") is not None
    hr.plugins.register_store("ftp", Echo)
    assert (await hr.read("ftp://host/x")).startswith(b"x of ftp://host")


@pytest.mark.asyncio
async def test_entry_point_names_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("echo", f"{__name__}:Echo", "headrace.stores")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: Echo)
    monkeypatch.setattr(registry, "entry_points", lambda group, name: [entry] if name == entry.name else [])
    assert (await hr.read("echo://place/x")).startswith(b"x of echo://place")


@pytest.mark.parametrize("scheme", ["s3", "https", "file", "hf", "pipe", "memory", "Shelf", "a", "1a", "a b", ""])
def test_built_in_or_invalid_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(hr.OptionError, match="scheme="):
        hr.plugins.register_store(scheme, Echo)
