"""One cache folder, filled, emptied and killed at by several processes; and disks that take nothing."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from process.waiting import output_of, trainer

PREAMBLE = """
import asyncio, os, random, resource, subprocess, sys, warnings
from pathlib import Path
from headrace.fetch.cache import Cache
from headrace._util.reads import Span

BLOCK = 4096
LIMIT = 256 * BLOCK

def body(number):
    return random.Random(number).randbytes(1000 + 97 * number)

async def put(cache, number):
    data = body(number)
    await cache.put(f"s3://bucket/{number}", 0, None, Span(0, len(data), len(data), None), data)

async def has(cache, number):
    found = await cache.get(f"s3://bucket/{number}", 0, None)
    assert found is None or found.data == body(number), "wrong bytes"
    return found is not None

def blocks(folder):
    return sum(-(-path.stat().st_size // BLOCK) for path in Path(folder).glob("*/*.range"))

"""

RANK = """
async def main(folder):
    cache = Cache(folder, LIMIT)
    rng = random.Random(os.getpid())
    for turn in range({turns}):
        for number in [rng.randrange(200) for _ in range(20)]:
            if not await has(cache, number):
                await put(cache, number)
        await cache.flush()
        print(turn, flush=True)
    await cache.aclose()
    assert cache.damaged == 0 and cache.hits > 0, vars(cache)

asyncio.run(main({folder!r}))
"""


@pytest.mark.slow
def test_ranks_share_a_folder_within_its_limit_though_some_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    largest = 6  # blocks
    with ExitStack() as running:
        endless, ending = (
            [
                running.enter_context(trainer(RANK.format(folder=str(folder), turns=turns), preamble=PREAMBLE))
                for _ in range(2)
            ]
            for turns in (10**6, 20)
        )
        for rank in (*endless, *ending):
            rank.line()
        for rank in endless:
            rank.line()
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ending:
            code, _, err = rank.finish()
            assert code == 0, err
    entries = list(folder.glob("*/*.range"))
    assert 0 < sum(-(-path.stat().st_size // 4096) for path in entries) <= 256 + 4 * largest
    check = """
async def main(folder):
    cache = Cache(folder, LIMIT)
    for number in range(200):
        await has(cache, number)
    await put(cache, 200)
    await cache.aclose()
    assert cache.damaged == 0
    print(cache.hits, blocks(folder))

asyncio.run(main(%r))
"""
    hits, blocks = map(int, output_of(check % str(folder), preamble=PREAMBLE).split())
    assert hits == len(entries)
    assert blocks <= 256


FULL = """
async def main(folder):
    cache = Cache(folder, 2**30)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(100):
            await put(cache, number)
            await cache.flush()
        found = [number for number in range(100) if await has(cache, number)]
        await cache.aclose()
    (warning,) = warned
    assert warning.category is RuntimeWarning, warning
    assert folder in str(warning.message), warning
    assert found == list(range(cache.written)), (found, vars(cache))
    assert 0 < cache.written < 100 and cache.dropped == 100 - cache.written, vars(cache)
    assert not list(Path(folder).rglob("*.part"))
    print(warning.message)

"""

READ_ONLY = """
async def main(folder):
    cache = Cache(folder, 2**30)
    await put(cache, 1)
    await cache.aclose()
    (entry,) = Path(folder).glob("*/*.range")
    os.utime(entry, (0, 0))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    cache = Cache(folder, 2**30)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in (1, 2, 3):
            if not await has(cache, number):
                await put(cache, number)
                await cache.flush()
        assert await has(cache, 1)
        await cache.aclose()
    (warning,) = warned
    assert (cache.hits, cache.misses, cache.written, cache.dropped) == (2, 2, 0, 2), vars(cache)
    print(warning.message)

"""

LIMITED = "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"


@pytest.fixture
def small_disk() -> list[str]:
    """A command line that runs another one where `$0` is a disk of 256 KiB, gone with its last process."""
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    try:
        subprocess.run([*prefix, "mount -t tmpfs tmpfs /mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a disk")
    return [*prefix, mount]


def run(script: str, folder: Path, command: Sequence[str] = ()) -> str:
    return output_of(f"{script}\nasyncio.run(main({str(folder)!r}))", preamble=PREAMBLE, command=command)


@pytest.mark.parametrize(("script", "told"), [(FULL, "No space left on device"), (READ_ONLY, "Read-only file system")])
def test_full_disk_only_ends_writing(script: str, told: str, tmp_path: Path, small_disk: list[str]) -> None:
    assert told in run(script, tmp_path, [*small_disk, str(tmp_path)])


def test_write_that_fails_half_way_ends_writing_and_loses_nothing(tmp_path: Path) -> None:
    assert "File too large" in run(LIMITED + FULL, tmp_path)
