"""A read that the cache has costs no request, and one whose entry is damaged is made again."""

import asyncio
from pathlib import Path

import pytest
from builders.tars import tar

import headrace as hr
from headrace.fetch import Reader
from headrace.options import Fetch
from headrace.testing import FaultServer

BODY = bytes(range(256)) * 2000


async def read_all(url: str, folder: Path) -> None:
    async with Reader(Fetch(cache_dir=folder), concurrency=4) as reader:
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


@pytest.mark.parametrize("ways", ["read", "read_into"])
def test_readers_of_a_machine_ask_the_server_once_for_what_all_of_them_want(tmp_path: Path, ways: str) -> None:
    async def run(urls: list[str]) -> None:
        readers = [
            Reader(Fetch(cache_dir=tmp_path), concurrency=8, data_set="one")
            for _ in range(3)  # as of three processes: none knows of the other
        ]

        async def one(reader: Reader, url: str) -> None:
            if ways == "read":
                assert await reader.read(url, 10, 5000) == BODY[10:5000]
            else:
                target = bytearray(4990)
                await reader.read_into(url, 10, memoryview(target))
                assert target == BODY[10:5000]

        await asyncio.gather(*(one(reader, url) for reader in readers for url in [*urls, *urls]))
        for reader in readers:
            await reader.aclose()

    with FaultServer() as server:
        urls = [server.add(f"{n}.bin", BODY) for n in range(20)]
        asyncio.run(run(urls))
        assert [len(server.requests_for(f"{n}.bin")) for n in range(20)] == [1] * 20


def test_data_set_that_no_loader_has_open_makes_room_for_the_next_one(tmp_path: Path) -> None:
    kept = hr.Fetch(cache_dir=tmp_path, cache_bytes=24 * 8192, hedge_share=0)
    with FaultServer() as server:

        def asked(names: list[str], epochs: int) -> list[int]:
            found = []
            with hr.DataLoader(
                hr.files([f"{server.url}/{name}" for name in names]), batch_size=8, fetch=kept
            ) as loader:
                for _ in range(epochs):
                    before = len(server.log)
                    assert sum(len(batch["bin"]) for batch in loader) == 24
                    found.append(len(server.log) - before)
            return found

        first, second = ([f"{which}{n}.bin" for n in range(24)] for which in "ab")
        for name in (*first, *second):
            server.add(name, bytes(7000))
        assert asked(first, 2) == [24, 0]
        assert asked(second, 2) == [24, 0], "the first one is in no loader any more"
        (again,) = asked(first, 1)
        assert 20 <= again <= 24


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["objects", "shards"])
def test_later_epochs_read_only_uncached_objects_from_the_store(tmp_path: Path, kind: str, shuffle: bool) -> None:
    size, count = 8192 - 512, 96  # in the cache each takes two blocks, or a shard of eight as many as nine headers add
    with FaultServer() as server:
        if kind == "objects":
            bodies = {f"{n}.bin": bytes([n]) * size for n in range(count)}
            urls = [server.add(name, body) for name, body in bodies.items()]
            data = hr.files(urls)
        else:
            bodies = {f"{n}.tar": tar([(f"{n}-{k}", {"bin": bytes([n]) * size}) for k in range(8)]) for n in range(12)}
            urls = [server.add(name, body) for name, body in bodies.items()]
            data = hr.stream(urls, index=None)
        data = data.shuffle() if shuffle else data
        kept = hr.Fetch(cache_dir=tmp_path, cache_bytes=count * 8192 // 2, hedge_share=0)
        asked = []
        for _ in range(2):  # and so it stays in a later run
            with hr.DataLoader(data.select("bin"), batch_size=8, fetch=kept) as loader:
                for _ in range(2):
                    before = len(server.log)
                    assert sum(len(batch["bin"]) for batch in loader) == count
                    asked.append(len(server.log) - before)
    assert asked[0] == len(bodies)
    most = len(bodies) // 2 + 1
    assert all(len(bodies) // 2 - 1 <= number <= most for number in asked[1:]), asked
