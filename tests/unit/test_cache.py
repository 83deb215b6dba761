"""What the cache gives is what was put, or nothing: whatever happens to its folder."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from unit.cache_use import BLOCK, LARGE, LIMIT, URL, blocks, entries, has, keep

from headrace._util.reads import Span
from headrace.fetch import cache as cache_module
from headrace.fetch.cache import Cache

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [0, 1, 100_000])
@pytest.mark.parametrize(("start", "stop", "etag"), [(None, None, None), (7, None, '"a"'), (7, 10**6, 'W/"ü\udce9"')])
async def test_another_process_gets_what_was_put(
    tmp_path: Path, kind: Any, size: int, start: int | None, stop: int | None, etag: str | None
) -> None:
    data = random.Random(size).randbytes(size)
    span = Span(start or 0, (start or 0) + size, 10**6, etag)
    first, second = Cache(tmp_path / "new" / "cache", LARGE), Cache(tmp_path / "new" / "cache", LARGE)
    assert await first.get(URL, start, stop) is None
    await first.put(URL, start, stop, span, kind(data))
    await first.aclose()
    found = await second.get(URL, start, stop)
    assert found is not None
    assert (found.data, found.span) == (data, span)
    assert await second.get(URL, 3, stop) is None
    await second.aclose()
    assert (first.hits, first.misses, first.written) == (0, 1, 1)
    assert (second.hits, second.misses, second.written) == (1, 1, 0)


async def test_start_0_is_the_same_range_as_no_start(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, URL, b"abc")
    assert await cache.get(URL, 0, None) == await cache.get(URL, None, None) is not None
    await cache.aclose()


async def test_memory_may_be_used_again_when_put_returns(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    memory = bytearray(b"before")
    await cache.put(URL, 0, 6, Span(0, 6, 6, None), memoryview(memory))
    memory[:] = b"after!"
    await cache.flush()
    found = await cache.get(URL, 0, 6)
    assert found is not None
    assert found.data == b"before"
    await cache.aclose()


async def test_only_the_demanded_version_is_given(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, URL, b"old", etag='"1"')
    assert [await has(cache, URL, etag) for etag in (None, '"1"', '"2"')] == [True, True, False]
    await keep(cache, URL, b"new", etag='"2"')
    assert [await has(cache, URL, etag) for etag in (None, '"1"', '"2"')] == [True, False, True]
    await keep(cache, URL, b"none")
    assert [await has(cache, URL, etag) for etag in (None, '"1"')] == [True, False]
    await cache.aclose()


AMZ = "X-Amz-Algorithm=A&X-Amz-Credential={0}%2Fs3&X-Amz-Date={0}&X-Amz-Expires=9&X-Amz-Signature={0}"
SAS = "sv=2024&se={0}&sr=b&sp=r&skoid=a&skt={0}&sig={0}"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (f"https://h/a?{AMZ.format(1)}", f"https://h/a?{AMZ.format(2)}&X-Amz-Security-Token=secret", True),
        (f"https://h/a?versionId=1&{AMZ.format(1)}", f"https://h/a?versionId=2&{AMZ.format(1)}", False),
        ("https://h/a?X-Goog-Date=1&X-Goog-Signature=1", "https://h/a?X-Goog-Date=2&X-Goog-Signature=2", True),
        (
            "https://h/a?AWSAccessKeyId=1&Signature=1&Expires=1",
            "https://h/a?AWSAccessKeyId=2&Signature=2&Expires=2",
            True,
        ),
        (
            "https://h/a?GoogleAccessId=1&Signature=1&Expires=1",
            "https://h/a?GoogleAccessId=1&Signature=2&Expires=2",
            True,
        ),
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
    ],
)
async def test_entry_is_of_one_object_whoever_signed_the_address(
    tmp_path: Path, one: str, other: str, same: bool
) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, one, b"abc")
    assert await has(cache, one)
    assert await has(cache, other) is same
    await cache.aclose()


async def test_another_endpoint_has_other_entries_and_another_key_has_not(tmp_path: Path) -> None:
    here = {"client_kwargs": {"endpoint_url": "http://here"}, "secret": "a"}
    there = {"client_kwargs": {"endpoint_url": "http://there"}, "secret": "a"}
    caches = [Cache(tmp_path, LARGE, options) for options in (here, there, here | {"secret": "b"}, None)]
    await keep(caches[0], "s3://bucket/a", b"abc")
    assert [await has(cache, "s3://bucket/a") for cache in caches] == [True, False, True, False]
    for cache in caches:
        await cache.aclose()


@pytest.mark.parametrize(
    "url", ["/data/a.tar", "a.tar", "C:\\a.tar", "file:///a.tar", "FILE:///a.tar", "memory://a.tar"]
)
async def test_what_is_on_this_machine_is_not_kept(tmp_path: Path, url: str) -> None:
    cache = Cache(tmp_path / "cache", LARGE)
    await keep(cache, url, b"abc")
    assert not await has(cache, url)
    await cache.aclose()
    assert not (tmp_path / "cache").exists()


def test_folder_holds_no_secret_and_is_the_users_alone(tmp_path: Path) -> None:
    async def run() -> None:
        cache = Cache(tmp_path, LARGE, {"endpoint": "http://user:hush@h", "token": "hush"})
        await keep(cache, "https://user:hush@h/hush?token=hush&X-Amz-Signature=hush", b"abc", etag='"1"')
        await cache.aclose()

    asyncio.run(run())
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 2
    for path in written:
        assert "hush" not in str(path)
        assert b"hush" not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


async def settled(awaitable: Awaitable[Any]) -> Any:
    result = await awaitable
    await asyncio.sleep(0)
    return result


async def test_what_others_may_have_written_is_not_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "a", LARGE)
    await keep(cache, URL, b"abc")
    assert await has(cache, URL)
    (entry,) = entries(tmp_path / "a")
    entry.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="may have been written by others"):
        assert not await settled(has(cache, URL))
    await cache.aclose()

    thesis = tmp_path / "thesis"
    thesis.write_text("of years")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tally").symlink_to(thesis)
    cache = Cache(tmp_path / "b", LARGE)
    with pytest.warns(RuntimeWarning, match="keeps nothing more"):
        await settled(keep(cache, URL, b"abc"))
    await cache.aclose()
    assert thesis.read_text() == "of years"


async def test_pipe_in_the_place_of_an_entry_is_neither_read_nor_waited_for(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, URL, b"abc")
    (entry,) = entries(tmp_path)
    entry.unlink()
    os.mkfifo(entry, 0o600)
    with pytest.warns(RuntimeWarning, match="may have been written by others"):
        assert not await settled(has(cache, URL))
    assert entry.is_fifo()
    await cache.aclose()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
async def test_entry_of_another_user_is_not_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, URL, b"abc")
    (entry,) = entries(tmp_path)
    os.chown(entry, 12345, -1)
    with pytest.warns(RuntimeWarning, match="may have been written by others"):
        assert not await settled(has(cache, URL))
    await cache.aclose()


def test_folder_is_the_users_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    async def run() -> None:
        cache = Cache(tmp_path / "above" / "cache", LARGE, data_set="one")
        await keep(cache, URL, b"abc")
        assert await cache.get_or_begin(f"{URL}/2", None, None) == (None, True)
        cache.end(f"{URL}/2", None, None)
        await cache.aclose()

    before = os.umask(0)
    try:
        asyncio.run(run())
    finally:
        os.umask(before)
    made = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert len(made) > 5
    assert [path for path in made if path.stat().st_mode & 0o077] == []


async def test_folder_stays_within_its_limit_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LIMIT)
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
    await cache.aclose()
    assert (cache.written, cache.dropped) == (101, 0)


async def test_entries_of_one_age_do_not_all_go(tmp_path: Path) -> None:
    """As when the folder was copied."""
    cache = Cache(tmp_path, LIMIT)
    for number in range(100):
        await cache.put(f"{URL}/{number}", None, None, Span(0, 3, 3, None), b"abc")
    await cache.flush()
    for path in entries(tmp_path):
        os.utime(path, (10**9, 10**9))
    await keep(cache, f"{URL}/100", b"abc")
    assert blocks(tmp_path) == 91
    await cache.aclose()


async def test_what_is_over_the_limit_alone_is_not_kept_and_drives_nothing_out(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LIMIT)
    await keep(cache, URL, b"abc")
    await keep(cache, f"{URL}/large", bytes(LIMIT))
    assert [await has(cache, URL), await has(cache, f"{URL}/large")] == [True, False]
    await keep(cache, f"{URL}/large", bytes(LIMIT - 200))
    assert [await has(cache, URL), await has(cache, f"{URL}/large")] == [False, True]
    await cache.aclose()
    assert (cache.written, cache.dropped) == (2, 1)


def test_use_is_noted_once_a_minute(tmp_path: Path) -> None:
    now = time.time() + 1000

    async def run() -> None:
        nonlocal now
        cache = Cache(tmp_path, LARGE, clock=lambda: now)
        await keep(cache, URL, b"abc")
        (path,) = entries(tmp_path)
        for step_s, noted in ((0, True), (59, False), (2, True), (-3600, False)):
            before = path.stat().st_mtime
            now += step_s
            assert await has(cache, URL)
            assert (path.stat().st_mtime != before) is noted
        await cache.aclose()

    asyncio.run(run())


def test_only_our_own_abandoned_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    paths = [tmp_path / name for name in ("ab/old.part", "ab/new.part", "ab/thesis.txt", "thesis.range", "thesis.part")]
    for path in paths:
        path.write_bytes(bytes(LIMIT))
        if path.name != "new.part":
            os.utime(path, (0, 0))

    async def run() -> None:
        cache = Cache(tmp_path, LIMIT)
        for number in range(3):
            await keep(cache, f"{URL}/{number}", bytes(LIMIT // 2))
        await cache.aclose()
        assert cache.written == 3

    asyncio.run(run())
    assert [path.exists() for path in paths] == [False, True, True, True, True]


@pytest.mark.parametrize("harm", ["nothing is left", "the tally is lost", "the tally is nonsense"])
async def test_folder_may_be_meddled_with_at_any_time(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "cache"
    cache = Cache(folder, LIMIT)
    await keep(cache, URL, bytes(LIMIT // 2))
    if harm == "nothing is left":
        shutil.rmtree(folder)
    elif harm == "the tally is lost":
        (folder / "tally").unlink()
    else:
        os.truncate(folder / "tally", 10**9)
    again = Cache(folder, LIMIT)
    await keep(again, f"{URL}/2", bytes(LIMIT // 4))
    await keep(cache, f"{URL}/3", bytes(LIMIT // 8))
    assert [await has(again, f"{URL}{path}") for path in ("", "/2", "/3")] == [
        harm != "nothing is left",
        True,
        True,
    ]
    await keep(cache, f"{URL}/4", bytes(LIMIT // 2))
    assert blocks(folder) <= 100
    await cache.aclose()
    await again.aclose()


class StuckDisk:
    """A folder in which writes hang until `release`: its tally is a pipe that nobody reads."""

    def __init__(self, folder: Path) -> None:
        self.tally = folder / "tally"
        self.tally.unlink(missing_ok=True)
        os.mkfifo(self.tally)

    @contextmanager
    def released(self) -> Iterator[None]:
        reader = os.open(self.tally, os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield
        finally:
            os.close(reader)


async def test_slow_disk_holds_up_no_read_and_little_memory(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, URL, b"abc")
    disk = StuckDisk(tmp_path)
    data = bytes(40 * 2**20)
    for number in range(3):
        await cache.put(f"{URL}/{number}", None, None, Span(0, len(data), len(data), None), data)
    assert await has(cache, URL)
    assert cache.dropped == 2
    with disk.released():
        await cache.flush()
        await keep(cache, f"{URL}/3", data)
    assert [await has(cache, f"{URL}/{number}") for number in range(4)] == [True, False, False, True]
    await cache.aclose()
    assert (cache.written, cache.dropped) == (3, 2)


async def test_closing_does_not_wait_for_ever_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_CLOSING_S", 0.01)
    disk = StuckDisk(tmp_path)
    cache = Cache(tmp_path, LARGE)
    for _ in range(3):
        await cache.put(URL, None, None, Span(0, 1, 1, None), b"a")
    await cache.aclose()
    await cache.aclose()
    with disk.released():
        # Two that waited, and the one under way: a pipe does not do as a tally.
        while cache.dropped < 3:  # noqa: ASYNC110  # there is no event: nobody waits for a cache that is closed
            await asyncio.sleep(0)
    await cache.put(URL, None, None, Span(0, 1, 1, None), b"a")
    assert cache.dropped == 4
    assert not await has(cache, URL)


async def test_cancelled_get_leaves_the_cache_in_order(tmp_path: Path) -> None:
    cache = Cache(tmp_path, LARGE)
    await keep(cache, URL, b"abc")
    reads = [asyncio.ensure_future(cache.get(URL, None, None)) for _ in range(10)]
    await asyncio.sleep(0)
    for read in reads:
        read.cancel()
    assert all(isinstance(x, asyncio.CancelledError) for x in await asyncio.gather(*reads, return_exceptions=True))
    assert await has(cache, URL)
    await cache.aclose()
    assert (cache.hits, cache.misses) == (1, 0)


@pytest.mark.parametrize(
    ("use", "argument", "what", "counts"),
    [(has, (), "is not used any more", (2, 0)), (keep, (b"abc",), "keeps nothing more", (0, 4))],
)
def test_folder_that_is_none_switches_the_cache_off_with_one_warning(
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

    @rule(number=NUMBERS, size=st.sampled_from([0, 1, 300, 5000]), etag=st.sampled_from([None, '"1"', '"2"']))
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


async def test_what_goes_to_an_objects_end_is_found_by_whoever_asks_for_more_or_for_less(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(100)
    cache = Cache(tmp_path, LARGE)
    await cache.put(URL, 20, 5000, Span(20, 100, 100, None), data[20:])
    await cache.put(f"{URL}/2", 20, 60, Span(20, 60, 100, None), data[20:60])
    await cache.flush()
    for stop, last in ((None, 100), (5000, 100), (100, 100), (99, 99), (21, 21)):
        found = await cache.get(URL, 20, stop)
        assert found is not None
        assert (found.data, found.span) == (data[20:last], Span(20, last, 100, None))
    assert await cache.get(URL, 19, 5000) is None
    assert [await cache.get(f"{URL}/2", 20, stop) is None for stop in (None, 61, 60, 59)] == [
        True,
        True,
        False,
        True,
    ]
    await cache.aclose()
