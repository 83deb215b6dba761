"""Caches return what was stored, or nothing, with any changes to their folders and other users of the machine."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headrace._util.reads import Span
from headrace.fetch import cache as cache_module
from headrace.fetch.cache import Cache
from headrace.formats.registry import format_named
from headrace.indexes import cache_path as module
from headrace.indexes.cache_path import cache_path, cached, names_path
from headrace.types import Buffer

URL = "https://host/shard.tar"
BLOCK = 4096
LIMIT = 100 * BLOCK
LARGE = 2**30
Opens = Callable[..., Cache]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Callable[..., Cache]]:
    """Opens caches in one folder. They are closed after the test."""
    caches: list[Cache] = []

    def opened(limit: int = LARGE, *args: Any, **options: Any) -> Cache:
        caches.append(Cache(tmp_path, limit, *args, **options))
        return caches[-1]

    yield opened
    for cache in caches:
        await cache.aclose()


@pytest.fixture
async def cache(opened: Opens) -> Cache:
    return opened()


@pytest.fixture
async def pair(opened: Opens) -> tuple[Cache, Cache]:
    """Two caches of one data set, as in two processes."""
    return opened(data_set="one"), opened(data_set="one")


async def put(cache: Cache, url: str, data: Buffer, start: int | None = None, etag: str | None = None) -> None:
    await cache.put(url, start, None, Span(start or 0, (start or 0) + len(data), 10**6, etag), data)


async def keep(cache: Cache, url: str, data: Buffer, start: int | None = None, etag: str | None = None) -> None:
    await put(cache, url, data, start, etag)
    await cache.flush()


async def begin(cache: Cache, url: str = URL) -> tuple[Buffer | None, bool]:
    """The bytes in the cache, and True if the caller is to read the missing ones."""
    found, is_begun = await cache.get_or_begin(url, None, None)
    return found and found.data, is_begun


async def has(cache: Cache, url: str, etag: str | None = None) -> bool:
    return await cache.get(url, None, None, etag) is not None


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*/*.range"))


def blocks(folder: Path) -> int:
    return sum(-(-path.stat().st_size // BLOCK) for path in entries(folder))


async def test_put_copies_the_memory_it_is_given(cache: Cache) -> None:
    memory = bytearray(b"before")
    await put(cache, URL, memoryview(memory))
    memory[:] = b"after!"
    await cache.flush()
    assert await begin(cache) == (b"before", False)


async def test_only_the_requested_version_is_returned(cache: Cache) -> None:
    await keep(cache, URL, b"old", etag='"1"')
    assert [await has(cache, URL, etag) for etag in (None, '"1"', '"2"')] == [True, True, False]
    await keep(cache, URL, b"new", etag='"2"')
    assert [await has(cache, URL, etag) for etag in (None, '"1"', '"2"')] == [True, False, True]
    await keep(cache, URL, b"none")
    assert [await has(cache, URL, etag) for etag in (None, '"1"')] == [True, False]


AMZ = "X-Amz-Algorithm=A&X-Amz-Credential={0}%2Fs3&X-Amz-Date={0}&X-Amz-Expires=9&X-Amz-Signature={0}"
SIGNED = "&Signature={0}&Expires={0}"
SAS = "sv=2024&se={0}&sr=b&sp=r&skoid=a&skt={0}&sig={0}"


@pytest.mark.parametrize(("one", "other", "same"), [
    (f"https://h/a?{AMZ.format(1)}", f"https://h/a?{AMZ.format(2)}&X-Amz-Security-Token=secret", True),
    (f"https://h/a?versionId=1&{AMZ.format(1)}", f"https://h/a?versionId=2&{AMZ.format(1)}", False),
    ("https://h/a?X-Goog-Date=1&X-Goog-Signature=1", "https://h/a?X-Goog-Date=2&X-Goog-Signature=2", True),
    (f"https://h/a?AWSAccessKeyId=1{SIGNED.format(1)}", f"https://h/a?AWSAccessKeyId=2{SIGNED.format(2)}", True),
    (f"https://h/a?GoogleAccessId=1{SIGNED.format(1)}", f"https://h/a?GoogleAccessId=1{SIGNED.format(2)}", True),
    ("https://h/a?Policy=1&Signature=1&Key-Pair-Id=1", "https://h/a?Policy=2&Signature=2&Key-Pair-Id=1", True),
    (f"https://h/a?{SAS.format(1)}", f"https://h/a?{SAS.format(2)}", True),
    (f"https://h/a?snapshot=1&{SAS.format(1)}", f"https://h/a?snapshot=2&{SAS.format(1)}", False),
    ("https://h/a?sr=1", "https://h/a?sr=2", False),
    ("https://h/a?key=1.jpg", "https://h/a?key=2.jpg", False),
    ("https://h/a?token=1", "https://h/a?token=2", False),
    ("https://h/a?Signature=1", "https://h/a?Signature=2", False),
    (f"https://h/a?{AMZ.format(1)}", f"https://h/b?{AMZ.format(1)}", False),
    (f"s3://h/a?{AMZ.format(1)}", f"s3://h/a?{AMZ.format(2)}", False),
    ("https://user:password@h/a", "https://h/a", True),
    ("abfs://one@account.dfs.core.windows.net/a", "abfs://two@account.dfs.core.windows.net/a", False),
    ("github://org:one@main/a", "github://org:two@main/a", False),
    ("https://h/a", "http://h/a", False),
    ("https://[h/a?", "https://[h/b?", False),
])  # fmt: skip
async def test_entry_does_not_depend_on_the_signature(cache: Cache, one: str, other: str, same: bool) -> None:
    await keep(cache, one, b"abc")
    assert await has(cache, one)
    assert await has(cache, other) is same


async def test_entries_depend_on_the_endpoint_and_not_on_credentials(opened: Opens) -> None:
    here = {"client_kwargs": {"endpoint_url": "http://here"}, "secret": "a"}
    there = {"client_kwargs": {"endpoint_url": "http://there"}, "secret": "a"}
    caches = [opened(LARGE, options) for options in (here, there, here | {"secret": "b"}, None)]
    await keep(caches[0], "s3://bucket/a", b"abc")
    assert [await has(cache, "s3://bucket/a") for cache in caches] == [True, False, True, False]


@pytest.mark.parametrize(
    "url", ["/data/a.tar", "a.tar", "C:\\a.tar", "file:///a.tar", "FILE:///a.tar", "memory://a.tar"]
)
async def test_local_objects_are_not_cached(tmp_path: Path, url: str) -> None:
    cache = Cache(tmp_path / "cache", LARGE)
    await keep(cache, url, b"abc")
    assert not await has(cache, url)
    await cache.aclose()
    assert not (tmp_path / "cache").exists()


async def settled(awaitable: Awaitable[Any]) -> Any:
    result = await awaitable
    await asyncio.sleep(0)
    return result


@pytest.mark.parametrize("harm", ["writable", "pipe", "other user"])
async def test_entry_writable_by_others_is_not_used(cache: Cache, tmp_path: Path, harm: str) -> None:
    await keep(cache, URL, b"abc")
    assert await has(cache, URL)
    (entry,) = entries(tmp_path)
    if harm == "writable":
        entry.chmod(0o666)
    elif harm == "pipe":
        entry.unlink()
        os.mkfifo(entry, 0o600)
    elif os.getuid() == 0:
        os.chown(entry, 12345, -1)
    else:
        pytest.skip("only root can give a file away")
    with pytest.warns(RuntimeWarning, match="may have been written by others"):
        assert not await settled(has(cache, URL))
    assert entry.is_fifo() is (harm == "pipe")


async def test_symbolic_link_instead_of_the_tally_is_not_written(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.write_text("of years")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tally").symlink_to(thesis)
    cache = Cache(tmp_path / "b", LARGE)
    with pytest.warns(RuntimeWarning, match="keeps nothing more"):
        await settled(keep(cache, URL, b"abc"))
    await cache.aclose()
    assert thesis.read_text() == "of years"


async def test_folder_has_no_secret_and_private_modes_under_any_umask(tmp_path: Path) -> None:
    folder, options = tmp_path / "above" / "cache", {"endpoint": "http://user:hush@h", "token": "hush"}
    before = os.umask(0)
    try:
        cache = Cache(folder, LARGE, options, data_set="one")
        await keep(cache, "https://user:hush@h/hush?token=hush&X-Amz-Signature=hush", b"abc", etag='"1"')
        assert await begin(cache, f"{URL}/2") == (None, True)
        cache.end(f"{URL}/2", None, None)
        await cache.aclose()
    finally:
        os.umask(before)
    made = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert len(made) > 5
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    assert not any("hush" in str(path) for path in made)
    assert not any(b"hush" in path.read_bytes() for path in made if path.is_file())


async def test_least_recently_used_entries_are_removed_at_the_limit(opened: Opens, tmp_path: Path) -> None:
    cache = opened(LIMIT)
    hour_ago = time.time() - 3600
    for number in range(50):  # two blocks each, its head in the second
        await keep(cache, f"{URL}/{number}", bytes(BLOCK))
        (newest,) = (path for path in entries(tmp_path) if path.stat().st_mtime > hour_ago + 1000)
        os.utime(newest, (hour_ago + number, hour_ago + number))
    assert blocks(tmp_path) == 100
    assert await has(cache, f"{URL}/0")
    await keep(cache, f"{URL}/50", bytes(BLOCK))
    assert blocks(tmp_path) <= 92
    found = [await has(cache, f"{URL}/{number}") for number in range(51)]
    assert found == [True] + [False] * 5 + [True] * 45
    for number in range(100, 150):
        await keep(cache, f"{URL}/{number}", bytes(3 * BLOCK))
        assert blocks(tmp_path) <= 100
    assert (cache.written, cache.dropped) == (101, 0)


async def test_entries_of_equal_age_are_not_all_removed(opened: Opens, tmp_path: Path) -> None:
    """As when the folder was copied."""
    cache = opened(LIMIT)
    for number in range(100):
        await put(cache, f"{URL}/{number}", b"abc")
    await cache.flush()
    for path in entries(tmp_path):
        os.utime(path, (10**9, 10**9))
    await keep(cache, f"{URL}/100", b"abc")
    assert blocks(tmp_path) == 91


async def test_entry_over_the_limit_is_not_stored_and_removes_nothing(opened: Opens) -> None:
    cache = opened(LIMIT)
    await keep(cache, URL, b"abc")
    await keep(cache, f"{URL}/large", bytes(LIMIT))
    assert [await has(cache, URL), await has(cache, f"{URL}/large")] == [True, False]
    await keep(cache, f"{URL}/large", bytes(LIMIT - 200))
    assert [await has(cache, URL), await has(cache, f"{URL}/large")] == [False, True]
    assert (cache.written, cache.dropped) == (2, 1)


async def test_access_time_is_updated_once_a_minute(opened: Opens, tmp_path: Path) -> None:
    now = time.time() + 1000
    cache = opened(clock=lambda: now)
    await keep(cache, URL, b"abc")
    (path,) = entries(tmp_path)
    for step_s, noted in ((0, True), (59, False), (2, True), (-3600, False)):
        before = path.stat().st_mtime
        now += step_s
        assert await has(cache, URL)
        assert (path.stat().st_mtime != before) is noted


async def test_only_abandoned_cache_files_are_removed(opened: Opens, tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    paths = [tmp_path / name for name in ("ab/old.part", "ab/new.part", "ab/thesis.txt", "thesis.range", "thesis.part")]
    for path in paths:
        path.write_bytes(bytes(LIMIT))
        if path.name != "new.part":
            os.utime(path, (0, 0))
    cache = opened(LIMIT)
    for number in range(3):
        await keep(cache, f"{URL}/{number}", bytes(LIMIT // 2))
    await cache.aclose()
    assert cache.written == 3
    assert [path.exists() for path in paths] == [False, True, True, True, True]


@pytest.mark.parametrize("harm", ["nothing is left", "the tally is lost", "the tally is nonsense"])
async def test_folder_may_be_changed_by_others_at_any_time(opened: Opens, tmp_path: Path, harm: str) -> None:
    cache = opened(LIMIT)
    await keep(cache, URL, bytes(LIMIT // 2))
    if harm == "nothing is left":
        shutil.rmtree(tmp_path)
    elif harm == "the tally is lost":
        (tmp_path / "tally").unlink()
    else:
        os.truncate(tmp_path / "tally", 10**9)
    again = opened(LIMIT)
    await keep(again, f"{URL}/2", bytes(LIMIT // 4))
    await keep(cache, f"{URL}/3", bytes(LIMIT // 8))
    assert await has(again, URL) is (harm != "nothing is left")
    assert [await has(again, f"{URL}{path}") for path in ("/2", "/3")] == [True, True]
    await keep(cache, f"{URL}/4", bytes(LIMIT // 2))
    assert blocks(tmp_path) <= 100


@contextmanager
def stuck_disk(folder: Path) -> Iterator[Callable[[], object]]:
    """Writes into the folder hang until the given function is called: its tally is a pipe that nobody reads."""
    tally, readers = folder / "tally", list[int]()
    tally.unlink(missing_ok=True)
    os.mkfifo(tally)
    try:
        yield lambda: readers.append(os.open(tally, os.O_RDONLY | os.O_NONBLOCK))
    finally:
        for reader in readers:
            os.close(reader)


async def test_slow_disk_neither_delays_reads_nor_fills_memory(cache: Cache, tmp_path: Path) -> None:
    await keep(cache, URL, b"abc")
    data = bytes(40 * 2**20)
    with stuck_disk(tmp_path) as release:
        for number in range(3):
            await put(cache, f"{URL}/{number}", data)
        assert await has(cache, URL)
        assert cache.dropped == 2
        release()
        await cache.flush()
        await keep(cache, f"{URL}/3", data)
    assert [await has(cache, f"{URL}/{number}") for number in range(4)] == [True, False, False, True]
    await cache.aclose()
    assert (cache.written, cache.dropped) == (3, 2)


async def test_close_waits_a_limited_time_for_the_disk(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_CLOSING_S", 0.01)
    with stuck_disk(tmp_path) as release:
        for _ in range(3):
            await put(cache, URL, b"a")
        await cache.aclose()
        await cache.aclose()
        release()
        # Two that waited, and the one under way: a pipe does not do as a tally.
        while cache.dropped < 3:  # noqa: ASYNC110  # there is no event: nobody waits for a cache that is closed
            await asyncio.sleep(0)
    await put(cache, URL, b"a")
    assert cache.dropped == 4
    assert not await has(cache, URL)


async def test_cancelled_get_leaves_the_cache_usable(cache: Cache) -> None:
    await keep(cache, URL, b"abc")
    reads = [asyncio.ensure_future(cache.get(URL, None, None)) for _ in range(10)]
    await asyncio.sleep(0)
    for read in reads:
        read.cancel()
    assert all(isinstance(x, asyncio.CancelledError) for x in await asyncio.gather(*reads, return_exceptions=True))
    assert await has(cache, URL)
    assert (cache.hits, cache.misses) == (1, 0)


@pytest.mark.parametrize(("use", "argument", "what", "counts"), [
    (has, (), "is not used any more", (2, 0)),
    (keep, (b"abc",), "keeps nothing more", (0, 4)),
])  # fmt: skip
def test_path_that_is_no_folder_disables_the_cache_with_one_warning(
    tmp_path: Path, use: Callable[..., Any], argument: tuple[Any, ...], what: str, counts: tuple[int, int]
) -> None:
    folder = tmp_path / "cache"
    folder.write_bytes(b"a file")

    async def run() -> None:
        cache = Cache(folder, LARGE)
        for _ in range(2):
            await asyncio.gather(*(use(cache, URL, *argument) for _ in range(2)))
        await cache.aclose()
        assert (cache.misses, cache.dropped) == counts

    with pytest.warns(RuntimeWarning, match=f"{folder} {what}.*Error: ") as warned:
        asyncio.run(run())
    assert len(warned) == 1
    assert folder.read_bytes() == b"a file"


NUMBERS = st.integers(0, 5)


class DamageModel(RuleBasedStateMachine):
    """Six addresses in a folder whose files are damaged: each damage may cost one entry, and no wrong byte is given."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.cache = Cache(self.folder, LARGE)
        self.kept: dict[int, tuple[bytes, Span]] = {}
        self.damages = 0
        self.random = random.Random(0)

    @rule(number=NUMBERS, size=st.sampled_from([0, 1, 300, 5000]), etag=st.sampled_from([None, '"1"', 'W/"ü\udce9"']))
    def put(self, number: int, size: int, etag: str | None) -> None:
        data = self.random.randbytes(size)
        span = Span(number, number + len(data), 10**6, etag)
        self.kept[number] = data, span
        self.runner.run(keep(self.cache, f"{URL}/{number}", data, number, etag))

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        before = self.cache.damaged
        found = self.runner.run(self.cache.get(f"{URL}/{number}", number, None))
        if found is not None:
            assert (found.data, found.span) == self.kept[number]
        elif self.kept.pop(number, None) is not None:
            self.damages -= 1
            assert self.damages >= 0
            assert self.runner.run(self.cache.get(f"{URL}/{number}", number, None)) is None
            assert self.cache.damaged == before + 1

    @precondition(lambda self: self.kept and self.damages < len(self.kept))
    @rule(data=st.data(), how=st.sampled_from(["truncate", "flip", "zero", "append", "swap"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        path, other = (data.draw(st.sampled_from(entries(self.folder))) for _ in range(2))
        body = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        if how == "truncate":
            del body[at:]
        elif how == "append":
            body += bytes(at + 1)
        elif how == "zero":
            body[at:] = bytes(len(body) - at)
        elif how == "flip" and body:
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "swap":
            body = bytearray(other.read_bytes())
            other.write_bytes(path.read_bytes())
            self.damages += other != path
        path.write_bytes(body)
        self.damages += 1

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.cache.aclose())
        self.cache = Cache(self.folder, LARGE)

    def teardown(self) -> None:
        for number in tuple(self.kept):
            self.get(number)
        self.runner.run(self.cache.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)


TestDamage = DamageModel.TestCase
TestDamage.settings = settings(max_examples=60, stateful_step_count=20)


async def test_entry_up_to_an_objects_end_serves_longer_and_shorter_ranges(cache: Cache) -> None:
    data = random.Random(0).randbytes(100)
    await keep(cache, f"{URL}/whole", b"abc")
    assert await cache.get(f"{URL}/whole", 0, None) == await cache.get(f"{URL}/whole", None, None) is not None
    await cache.put(URL, 20, 5000, Span(20, 100, 100, None), data[20:])
    await cache.put(f"{URL}/2", 20, 60, Span(20, 60, 100, None), data[20:60])
    await cache.flush()
    for stop, last in ((None, 100), (5000, 100), (100, 100), (99, 99), (21, 21)):
        found = await cache.get(URL, 20, stop)
        assert found is not None
        assert (found.data, found.span) == (data[20:last], Span(20, last, 100, None))
    assert await cache.get(URL, 19, 5000) is None
    found_until = {stop: await cache.get(f"{URL}/2", 20, stop) is not None for stop in (None, 61, 60, 59)}
    assert found_until == {None: False, 61: False, 60: True, 59: False}


# Several data sets and processes


async def epoch(cache: Cache, numbers: Iterable[int]) -> int:
    """Get half a block for each number, and store what is missing. Returns how many were found."""
    found = 0
    for number in numbers:
        if await has(cache, f"{URL}/{number}"):
            found += 1
        else:
            await keep(cache, f"{URL}/{number}", bytes(BLOCK // 2))
    return found


async def test_common_entries_of_two_data_sets_are_stored_once(opened: Opens, tmp_path: Path) -> None:
    first = opened(LIMIT, data_set="first")
    await epoch(first, range(60))
    second = opened(LIMIT, data_set="second")
    assert await epoch(second, range(40)) == 40
    await first.aclose()
    assert await epoch(second, range(40)) == 40
    await epoch(opened(LIMIT, data_set="third"), range(100, 200))
    assert await epoch(second, range(40)) == 40
    assert blocks(tmp_path) <= 100


async def test_entries_without_a_data_set_are_found_and_make_room(opened: Opens) -> None:
    before = opened(LIMIT)
    await epoch(before, range(100))
    await before.aclose()
    now = opened(LIMIT, data_set="one")
    assert await epoch(now, range(50)) == 50
    assert await epoch(now, range(200, 250)) == 0
    assert await epoch(now, [*range(50), *range(200, 250)]) == 100


async def test_full_folder_is_scanned_once_a_minute(opened: Opens) -> None:
    now = time.time()
    first, second = (opened(LIMIT, data_set=name, clock=lambda: now) for name in ("first", "second"))
    await epoch(first, range(100))
    await epoch(second, [200])
    await first.aclose()
    await epoch(second, [200])
    assert second.dropped == 2, "it is as full as it was"
    now += 61
    await epoch(second, [200])
    assert (second.written, second.dropped) == (1, 2)


async def test_another_reader_fetches_after_the_first_failed(opened: Opens) -> None:
    caches = [opened(data_set="one") for _ in range(3)]
    assert await begin(caches[0]) == (None, True)
    waiting = {asyncio.ensure_future(begin(cache)): cache for cache in caches[1:]}
    caches[0].end(URL, None, None)
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert len(left) == 1, "one after the other"
    (first,), (second,) = done, left
    assert first.result() == (None, True)
    await put(waiting[first], URL, b"abc")
    waiting[first].end(URL, None, None)
    assert await second == (b"abc", False)


async def test_waiting_for_another_reader_times_out(pair: tuple[Cache, Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_OTHERS_S", 0.01)
    one, other = pair
    assert [await begin(cache) for cache in (one, other, one)] == [(None, True), (None, False), (None, False)]
    one.end(URL, None, None)


async def test_cancelled_read_releases_waiting_readers(pair: tuple[Cache, Cache]) -> None:
    one, other = pair
    urls = [f"{URL}/{n}" for n in range(10)]
    for turns in range(8):
        asked = [asyncio.ensure_future(begin(one, url)) for url in urls]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        for url, outcome in zip(urls, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if not isinstance(outcome, BaseException):
                one.end(url, None, None)
        for url in urls:
            assert await begin(other, url) == (None, True)
            other.end(url, None, None)


async def test_objects_that_are_not_cached_are_fetched_without_waiting(opened: Opens) -> None:
    pair = [opened(LIMIT, data_set="one") for _ in range(2)]
    for cache in pair:
        await epoch(cache, range(101))
    for cache in 2 * pair:
        assert await begin(cache, f"{URL}/200") == (None, False)


HOLDER = """
import asyncio, sys
from headrace.fetch.cache import Cache

async def run():
    cache = Cache(sys.argv[1], 2**30, data_set="one")
    print(await cache.get_or_begin(sys.argv[2], None, None), flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


@pytest.mark.process
def test_killed_reader_releases_waiting_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_OTHERS_S", 3600.0)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), URL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "(None, True)\n"

        async def run() -> None:
            cache = Cache(tmp_path, LARGE, data_set="one")
            waiting = asyncio.ensure_future(begin(cache))
            assert await begin(cache, f"{URL}/2") == (None, True)
            cache.end(f"{URL}/2", None, None)
            assert not waiting.done()
            holder.kill()
            assert await waiting == (None, True)
            cache.end(URL, None, None)
            await cache.aclose()

        asyncio.run(run())


URLS = ["s3://bucket/a.tar"]
TAR = format_named("tar")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of caches; folders that last as long as the process are made beside it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    module._folder_of_process.cache_clear()
    module._warn.cache_clear()


def test_folders_are_made_for_their_user_alone_whatever_the_umask_is(home: Path) -> None:
    before = os.umask(0)
    try:
        places = [cache_path(URLS), names_path("s3://bucket/")]
    finally:
        os.umask(before)
    assert cached(URLS, None, TAR) is None
    places[0].touch()
    assert cached(URLS, None, TAR) == places[0]
    made = [home, *home.rglob("*/")]
    assert len(made) == 4
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def indexes(home: Path) -> Path:
    folder = home / "headrace" / "indexes"
    folder.mkdir(parents=True)
    return folder


def link(home: Path, *, owner: int, target_owner: int) -> None:
    (home.parent / "target" / "indexes").mkdir(parents=True)
    os.chown(home.parent / "target", target_owner, -1)
    home.mkdir()
    (home / "headrace").symlink_to(home.parent / "target")
    os.chown(home / "headrace", owner, -1, follow_symlinks=False)


OTHER = 12345  # a user, and a group
PLANTED: dict[str, Callable[[Path], object]] = {
    "home that all can write": lambda home: home.mkdir() or home.chmod(0o777),
    "folder that all can write": lambda home: indexes(home).chmod(0o777),
    "folder that a group can write": lambda home: (
        os.chown(indexes(home).parent, -1, OTHER) or (home / "headrace").chmod(0o770)
    ),
    "folder of another user": lambda home: os.chown(indexes(home).parent, OTHER, -1),
    "link to the folder of another user": partial(link, owner=0, target_owner=OTHER),
    "link by another user": partial(link, owner=OTHER, target_owner=0),
    "file": lambda home: home.write_text(""),
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("planted", PLANTED)
def test_folder_that_others_can_write_is_not_used_with_one_warning(home: Path, planted: str) -> None:
    PLANTED[planted](home)
    folder = home / "headrace" / "indexes"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        place = cache_path(URLS)
        assert cache_path(URLS) == place
        if folder.exists():
            (folder / place.name).touch()
            assert cached(URLS, None, TAR) is None
    assert home not in place.parents
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert all("set XDG_CACHE_HOME" in str(one.message) for one in warned)
    assert len({str(one.message) for one in warned}) == len(warned) == 1 + folder.exists()


def test_user_without_a_home_uses_a_temporary_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cached(URLS, None, TAR) is None
    with pytest.warns(RuntimeWarning, match="no home; set XDG_CACHE_HOME"):
        place = cache_path(URLS)
    place.touch()
    assert cached(URLS, None, TAR) is None
    module._remove(place.parent, os.getpid())
    assert not place.parent.exists()
