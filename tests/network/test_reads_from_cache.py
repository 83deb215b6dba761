"""A read that the cache has costs no request, and one whose entry is damaged is made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import ObjectChangedError
from headrace.fetch import Reader
from headrace.options import FetchOptions
from headrace.testing import FaultServer

BODY = bytes(range(256)) * 2000


async def read_all(url: str, folder: Path) -> None:
    """As three ways to read do, byte for byte."""
    async with Reader(FetchOptions(cache_dir=folder), concurrency=4) as reader:
        assert await reader.read(url) == BODY
        assert await reader.read(url, 1000, 9000) == BODY[1000:9000]
        target = bytearray(300_000)
        span = await reader.read_into(url, 400_000, memoryview(target))
        assert (span.start, span.stop, span.size) == (400_000, len(BODY), len(BODY))
        assert target[: len(BODY) - 400_000] == BODY[400_000:]


def test_second_reader_asks_the_server_for_what_is_damaged_only(tmp_path: Path) -> None:
    with FaultServer() as server:
        url = server.add("a.bin", BODY)
        asyncio.run(read_all(url, tmp_path))
        first = len(server.requests_for("a.bin"))
        asyncio.run(read_all(f"{url}?X-Amz-Date=2&X-Amz-Signature=2", tmp_path))
        assert len(server.requests_for("a.bin")) == first
        entries = list(tmp_path.rglob("*.range"))
        assert len(entries) == 3
        entries[1].write_bytes(entries[1].read_bytes()[:-1])
        asyncio.run(read_all(url, tmp_path))
        assert len(server.requests_for("a.bin")) == first + 1
        asyncio.run(read_all(url, tmp_path))
        assert len(server.requests_for("a.bin")) == first + 1


def test_demanded_version_is_not_taken_from_an_older_entry(tmp_path: Path) -> None:
    async def run(url: str, etag: str) -> None:
        async with Reader(FetchOptions(cache_dir=tmp_path), concurrency=1) as reader:
            await reader.read_into(url, 0, memoryview(bytearray(100)), etag=etag)

    with FaultServer() as server:
        url = server.add("a.bin", BODY)
        asyncio.run(read_all(url, tmp_path))
        with pytest.raises(ObjectChangedError):
            asyncio.run(run(url, '"another"'))


@pytest.mark.parametrize("entry", ["a file in place of the folder", "a folder in place of an entry"])
def test_folder_out_of_order_loses_no_read(tmp_path: Path, entry: str) -> None:
    folder = tmp_path / "cache"
    with FaultServer() as server:
        url = server.add("a.bin", BODY)
        if entry == "a file in place of the folder":
            folder.touch()
        else:
            asyncio.run(read_all(url, folder))
            for path in folder.rglob("*.range"):
                path.unlink()
                path.mkdir()
        with pytest.warns(RuntimeWarning, match="is not used any more"):
            asyncio.run(read_all(url, folder))
