"""Reads from servers that give whole objects only, and reads that the cache has: each costs the requests it must."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builders.tars import numbered_samples, tar
from network.bodies import numbered
from network.scripted import Reply, Script, chunked, ok, serving

import headrace as hr
from headrace._util.reads import Span
from headrace.errors import BadResponseError, ObjectChangedError
from headrace.fetch import Reader
from headrace.fetch.web.connection import Rest
from headrace.options import Fetch
from headrace.testing import FaultServer

SHARDS, IN_SHARD = 3, 40
SMALL = Fetch(range_bytes=64 * 1024, backoff_s=0.0, hedge_share=0)
BODY = numbered(900_000)
DATES = ("Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT", "Last-Modified: Wed, 02 Jan 2030 00:00:00 GMT")
BREAKS = ["close_body:times=2", "reset_body:times=2", "stall:times=2,s=3600", "slowdown:times=2"]
KEYS = [f"{n:06d}" for n in range(SHARDS * IN_SHARD)]


def shard(number: int) -> bytes:
    return tar(numbered_samples(number * IN_SHARD, IN_SHARD, size=20_000))  # a dozen ranges


def keys_of(loader: hr.DataLoader) -> list[str]:
    return [key for batch in loader for key in batch[0]]


class PythonsServer:
    """`python -m http.server` as people start it: HTTP/1.0, no ranges, no ETags."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        served = folder / "served"
        served.mkdir()
        for number in range(SHARDS):
            (served / f"train-{number}.tar").write_bytes(shard(number))
        command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(served)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        found = re.search(r"port (\d+)", self.process.stdout.readline())
        assert found is not None
        self.url = f"http://127.0.0.1:{found[1]}/train-{{0..{SHARDS - 1}}}.tar"

    def requests(self) -> list[str]:
        """The names that were asked for, but not what was not there."""
        return re.findall(r'"GET /(\S+) HTTP/1.1" 200', self._log.read_text())


@pytest.fixture
def pythons(tmp_path: Path) -> Iterator[PythonsServer]:
    server = PythonsServer(tmp_path)
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_makes_one_request_a_shard(pythons: PythonsServer, num_workers: int) -> None:
    data = hr.stream(pythons.url).to_tuple("__key__", "bin")
    options = {"fetch": SMALL, "batch_size": 7, "num_workers": num_workers}
    with hr.DataLoader(data, collate_fn=lambda batch: list(zip(*batch, strict=True)), **options) as loader:
        for _ in range(3):
            wanted = dict(sample for k in range(SHARDS) for sample in numbered_samples(k * IN_SHARD, IN_SHARD, 20_000))
            got = [(key, bytes(body)) for keys, bodies in loader for key, body in zip(keys, bodies, strict=True)]
            assert got == [(key, wanted[key]["bin"]) for key in KEYS]
    assert sorted(pythons.requests()) == sorted(3 * [f"train-{k}.tar" for k in range(SHARDS)])


def test_stream_from_pythons_server_fits_a_small_memory_budget(pythons: PythonsServer) -> None:
    data = hr.stream(pythons.url).shuffle(seed=3).to_tuple("__key__")
    with hr.DataLoader(data, batch_size=7, fetch=SMALL, memory_budget=2**20) as loader:
        epochs = [keys_of(loader) for _ in range(2)]
    assert [sorted(keys) for keys in epochs] == [KEYS, KEYS]
    assert len(pythons.requests()) == 2 * SHARDS


def test_epoch_that_is_left_early_leaves_no_answer_open(pythons: PythonsServer) -> None:
    data = hr.stream(pythons.url).to_tuple("__key__")
    with hr.DataLoader(data, batch_size=3, fetch=SMALL, memory_budget=2**20) as loader:
        for batch in loader:
            assert list(batch[0]) == KEYS[:3]
            break
        assert keys_of(loader) == KEYS


def test_shard_of_which_the_cache_has_the_beginning_is_read_on(pythons: PythonsServer, tmp_path: Path) -> None:
    fetch = Fetch(range_bytes=64 * 1024, cache_dir=tmp_path / "cache")
    data = hr.stream(pythons.url).to_tuple("__key__")
    with hr.DataLoader(data, batch_size=3, fetch=fetch, memory_budget=2**20) as loader:
        next(iter(loader))
        assert keys_of(loader) == KEYS
    parts = sorted((tmp_path / "cache").rglob("*"), key=lambda path: path.name)
    for path in [path for path in parts if path.is_file()][::2]:
        path.unlink()
    with hr.DataLoader(data, batch_size=3, fetch=fetch, memory_budget=2**20) as loader:
        assert keys_of(loader) == KEYS


def test_index_of_shards_on_a_server_without_ranges_says_what_is_missing(pythons: PythonsServer) -> None:
    data = hr.stream(pythons.url, index="build").shuffle("global", seed=1).to_tuple("__key__", "bin")
    with hr.DataLoader(data, batch_size=7, fetch=SMALL) as loader:
        with pytest.raises(BadResponseError, match=r"ignores byte ranges.*not by an index"):
            keys_of(loader)


@pytest.mark.slow
@pytest.mark.parametrize("how", BREAKS)
def test_body_that_breaks_is_asked_for_again_once_for_each_break(how: str) -> None:
    fetch = Fetch(range_bytes=64 * 1024, backoff_s=0.0, stall_timeout_s=0.5, first_byte_timeout_s=0.5)
    with FaultServer(seed=3) as server:
        urls = [server.add(f"train-{k}.tar", shard(k), "no_ranges", how) for k in range(SHARDS)]
        data = hr.stream(urls).to_tuple("__key__")
        with hr.DataLoader(data, batch_size=7, fetch=fetch) as loader:
            assert keys_of(loader) == KEYS
        asked = [request.name for request in server.log if request.name.endswith(".tar")]
    # two times for each range that meets a fault; the fault counts its own by object and range
    assert len(asked) <= SHARDS * (1 + 2 * 3)


@pytest.mark.parametrize("how", ["chunked", "close", "interim"])
def test_whole_is_taken_in_parts_in_every_framing(how: str) -> None:
    with FaultServer(seed=3) as server:
        urls = [server.add(f"train-{k}.tar", shard(k), "no_ranges", how) for k in range(SHARDS)]
        loader = hr.DataLoader(hr.stream(urls).to_tuple("__key__"), batch_size=7, fetch=SMALL)
        if how == "chunked":
            with loader, pytest.raises(BadResponseError, match="does not report the size"):
                keys_of(loader)
            return
        with loader:
            assert keys_of(loader) == KEYS
        assert len([request for request in server.log if request.name.endswith(".tar")]) == SHARDS


@asynccontextmanager
async def reading(*answers: Reply | bytes) -> AsyncIterator[tuple[Script, Callable[..., Any]]]:
    """A server, and a function that reads `size` bytes from `start` on by one `Rest`."""
    async with serving(*answers) as server, Reader(SMALL, concurrency=4) as reader:
        rest = Rest()

        async def read(start: int, size: int, **options: Any) -> tuple[Span, bytes]:
            room = bytearray(size)
            return await reader.read_into(server.url, start, memoryview(room), rest=rest, **options), bytes(room)

        yield server, read
        rest.release()


@pytest.mark.asyncio
async def test_parts_come_from_one_answer_and_go_back_to_a_new_one() -> None:
    async with reading(ok(BODY, DATES[0])) as (server, read):
        for start in (0, 300_000, 600_000, 100):
            span, got = await read(start, 300_000)
            assert (span.start, span.stop, span.in_order) == (start, start + 300_000, True)
            assert got == BODY[start : start + 300_000]
        assert len(server.requests) == 2


@pytest.mark.asyncio
async def test_part_behind_a_gap_is_taken_from_the_same_answer() -> None:
    async with reading(ok(BODY)) as (server, read):
        await read(0, 1000)
        assert (await read(700_000, 1000))[1] == BODY[700_000:701_000]
        assert len(server.requests) == 1


CUT, TAGGED = ok(BODY, DATES[0])[:400_000], ok(BODY, 'ETag: "a"')[:400_000]
ANOTHER: list[tuple[list[Reply | bytes], int, int, type[Exception], str | None]] = [  # (…, starts of two reads, …)
    ([Reply(CUT, "end"), ok(BODY[::-1], DATES[1])], 0, 300_000, ObjectChangedError, None),
    ([Reply(TAGGED, "end"), ok(BODY[::-1], 'ETag: "b"')], 0, 300_000, ObjectChangedError, None),
    ([ok(BODY), ok(BODY[::-1], 'ETag: "b"')], 300_000, 0, ObjectChangedError, "it had no version"),
    ([Reply(ok(BODY)[:400_000], "end"), chunked(b"<html>Log in")], 0, 300_000, BadResponseError, "before the part"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("answers", "first", "second", "error", "text"), ANOTHER)
async def test_answer_of_another_object_is_an_error(
    answers: list[Reply | bytes], first: int, second: int, error: type[Exception], text: str | None
) -> None:
    async with reading(*answers) as (_, read):
        span, _ = await read(first, 300_000)
        with pytest.raises(error, match=text):
            await read(second, 300_000, etag=span.etag)


CACHED = bytes(range(256)) * 2000


async def read_all(url: str, folder: Path) -> None:
    async with Reader(Fetch(cache_dir=folder), concurrency=4) as reader:
        assert await reader.read(url) == CACHED
        assert await reader.read(url, 1000, 9000) == CACHED[1000:9000]
        target = bytearray(300_000)
        span = await reader.read_into(url, 400_000, memoryview(target))
        assert (span.start, span.stop, span.size) == (400_000, len(CACHED), len(CACHED))
        assert target[: len(CACHED) - 400_000] == CACHED[400_000:]


def test_second_reader_asks_the_server_for_what_is_damaged_only(tmp_path: Path) -> None:
    with FaultServer() as server:
        url = server.add("a.bin", CACHED)
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
                assert await reader.read(url, 10, 5000) == CACHED[10:5000]
            else:
                target = bytearray(4990)
                await reader.read_into(url, 10, memoryview(target))
                assert target == CACHED[10:5000]

        await asyncio.gather(*(one(reader, url) for reader in readers for url in [*urls, *urls]))
        for reader in readers:
            await reader.aclose()

    with FaultServer() as server:
        urls = [server.add(f"{n}.bin", CACHED) for n in range(20)]
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
