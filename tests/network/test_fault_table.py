"""Each fault on three requests in ten, and cancelled reads: byte-exact or the one right error, and little in vain.

A seed is one run; HEADRACE_SEEDS is the number of runs over all rows of the table.
"""

import asyncio
import os
import random
import selectors
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

import pytest

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    ChecksumError,
    ObjectChangedError,
    ObjectMissingError,
    StorageError,
)
from headrace.fetch import Reader
from headrace.options import Fetch
from headrace.testing import FaultServer
from headrace.testing.fault_server.faults import FAULTS

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "200"))
SMALL, LONG = random.Random(1).randbytes(83_000), random.Random(2).randbytes(900_000)
SECRETS = {"Authorization": "Bearer secret", "X-Api-Key": "secret"}

KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}

# Three requests in ten fail: 25 attempts fail together less often than once in 10¹³ reads.
PATIENT = Fetch(attempts=25, backoff_s=0.0)
QUICK = Fetch(attempts=25, backoff_s=0.0, first_byte_timeout_s=0.5, stall_timeout_s=0.5)


@dataclass(frozen=True)
class Row:
    """The possible ends of a read with faults, apart from the right bytes.

    Attributes:
        right: the errors, of exactly these types.
        unseen: other bytes too: the answer is wrong, and agrees with all that is known. Given checksums, it is seen.
        costs: whether a hit is a request that has to be made again.
        versions: whether objects of another version are there, which a read may give as a whole.
    """

    right: tuple[type[StorageError], ...] = ()
    unseen: bool = False
    costs: bool = True
    versions: bool = False
    options: Fetch = PATIENT


EXACT, FREE, IN_TIME = Row(), Row(costs=False), Row(options=QUICK)
DENIED, REFUSED = Row((AccessDeniedError,)), Row((StorageError,))
# A proxy's slip passes; what comes twice in a row is taken for what the server always does.
BAD = Row((BadResponseError,))
UNSEEN = Row((BadResponseError,), unseen=True)

TABLE = {
    "clean": FREE,
    "latency:ms=2": FREE,
    "latency:dist=pareto,ms=1,max=50": FREE,
    "slowdown": EXACT,
    "slowdown:retry_after=0.05": EXACT,
    "slowdown:retry_after=1,date=1": EXACT,
    "status:code=599": EXACT,
    "s400": REFUSED,
    "s401": DENIED,
    "s403": DENIED,
    "s404": Row((ObjectMissingError,)),
    "s405": REFUSED,
    "s408": EXACT,
    "s416": Row((StorageError, BadResponseError)),
    "s429:retry_after=0.05": EXACT,
    "s500": EXACT,
    "s502": EXACT,
    "s504": EXACT,
    "expired": DENIED,
    "expired:skew=1": DENIED,
    "reset_pre": EXACT,
    "close_pre": EXACT,
    "hang": IN_TIME,
    "head_stall": IN_TIME,
    "stall": IN_TIME,
    "drip:bps=2000000": FREE,
    "reset_body": EXACT,
    "close_body": EXACT,
    "short_chunked": EXACT,
    "chunked": FREE,
    "no_length": BAD,
    "no_length:at=0.5": BAD,
    "len_more": BAD,
    "len_less": UNSEEN,
    "ignore_range": BAD,
    "no_ranges": BAD,
    "wrong_range:mode=label": BAD,
    "wrong_range:mode=total": BAD,
    "wrong_range:mode=short": BAD,
    "wrong_range:mode=none": BAD,
    "wrong_range:mode=data": UNSEEN,
    "multipart": BAD,
    "flip": UNSEEN,
    "zeros": UNSEEN,
    "html200": Row((BadResponseError, ObjectChangedError), unseen=True),
    "replaced": Row(versions=True, costs=False),
    "replaced+close_body": Row((ObjectChangedError,), versions=True),
    "etag": FREE,
    "etag+close_body": Row((ObjectChangedError,)),
    "etag:weak=1,p=1+reset_body": EXACT,
    "etag:none=1+close_body": Row((ObjectChangedError,)),
    "redirect:n=2": EXACT,
    "redirect:mode=other,code=307": EXACT,
    "redirect:mode=loop": BAD,
    "redirect:mode=path,n=9": BAD,
    "redirect:mode=file": BAD,
    "gzipped": BAD,
    "gzipped:hide=1": UNSEEN,
    "gzbomb:mb=8": BAD,
    "silent_close": FREE,
    "close": FREE,
    "interim": FREE,
    "bad_head": BAD,
    "bad_head:mode=status": BAD,
    "bad_head:mode=nul": BAD,
    "bad_head:mode=long,n=70000": BAD,
    "head_lies": FREE,
}

Outcome = bytes | BaseException


def seeds_of(row: str) -> list[int]:
    return list(range(list(TABLE).index(row), SEEDS, len(TABLE))) or [SEEDS]


async def read_all(reader: Reader, base: str, *, checked: bool) -> list[tuple[bytes, Outcome]]:
    async def read(name: str, data: bytes, start: int | None = None, *, into: bool = False) -> bytes:
        crc = zlib.crc32(data)
        check = (lambda got: zlib.crc32(got) == crc) if checked else None
        if not into:
            stop = None if start is None else start + len(data)
            return await reader.read(f"{base}/{name}", start, stop, check=check)
        target = memoryview(bytearray(len(data)))
        span = await reader.read_into(f"{base}/{name}", start or 0, target, check=check)
        return bytes(target[: span.stop - span.start])

    reads: list[tuple[bytes, Awaitable[bytes]]] = [(LONG, read("long/whole", LONG))]
    for n in range(6):
        part = SMALL[10_000 * n : 10_000 * n + 20_000]
        reads += [(SMALL, read(f"whole/{n}", SMALL)), (part, read(f"part/{n}", part, 10_000 * n))]
    for start in (0, 300_000, 600_000):
        part = LONG[start : start + 250_000]
        reads += [(part, read("long/parts", part, start)), (part, read("long/filled", part, start, into=True))]
    reads += [(LONG[-size:], read(f"long/end{size}", LONG[-size:], -size, into=True)) for size in (5000, 300_000)]
    outcomes = await asyncio.gather(*(read for _, read in reads), return_exceptions=True)
    return list(zip((wanted for wanted, _ in reads), outcomes, strict=True))


async def run(faults: str, row: Row, seed: int, *, checked: bool = False) -> list[tuple[bytes, Outcome]]:
    objects = {f"long/{name}": LONG for name in ("whole", "parts", "filled", "end5000", "end300000")}
    objects |= {f"{kind}/{n}": SMALL for kind in ("whole", "part") for n in range(6)}
    named = (fault.partition(":") for fault in faults.split("+"))
    rules = [f"{name}:p=0.3,{parameters}" for name, _, parameters in named]
    with FaultServer(objects, faults=rules, seed=seed) as server:
        is_s3 = seed // len(TABLE) % 2 == 1
        base, settings = ("s3:/", {**KEYS, "endpoint": server.url}) if is_s3 else (server.url, {"headers": SECRETS})
        async with Reader(row.options, concurrency=8, storage_options=settings, rng=random.Random(seed)) as reader:
            ended = await read_all(reader, base, checked=checked)
            assert reader.meter.in_flight == 0
        assert server.retry_after_violations == 0
        assert not server.credential_leaks
        assert any(request.headers.get("x-api-key") == "secret" for request in server.log) != is_s3
        again = sum(bool(request.faults) or "hops" in request.query for request in server.log) if row.costs else 0
        if row.options is QUICK:  # a busy machine is too slow for these limits, too
            again = reader.meter.retries
        assert len(server.log) <= 1.3 * (len(ended) * (1 + checked) + again)
    return ended


def is_right(wanted: bytes, got: Outcome, row: Row) -> bool:
    if isinstance(got, BaseException):
        return type(got) in row.right
    return got == wanted or (row.versions and got == wanted.translate(bytes(255 - n for n in range(256))))


async def run_all(names: list[str], table: dict[str, Row], *, checked: bool = False) -> list[str]:
    async def wrong(faults: str, seed: int) -> list[str]:
        row = table[faults]
        ended = await run(faults, row, seed, checked=checked)
        assert row.right or any(isinstance(got, bytes) for _, got in ended)
        return [f"{faults}, seed {seed}: {got!r:.300}" for wanted, got in ended if not is_right(wanted, got, row)]

    runs = [(name, seed) for name in names for seed in seeds_of(name)]
    found: list[str] = []
    for first in range(0, len(runs), 16):  # many at once: what stalls or is throttled takes its time
        for some in await asyncio.gather(*(wrong(*one) for one in runs[first : first + 16])):
            found += some
    return found


SEEN = [name for name, row in TABLE.items() if not row.unseen]
UNSEEN_ONES = [name for name, row in TABLE.items() if row.unseen]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("names", [SEEN[n : n + 5] for n in range(0, len(SEEN), 5)], ids=", ".join)
async def test_read_is_exact_or_the_right_error(names: list[str]) -> None:
    assert not await run_all(names, TABLE)


@pytest.mark.asyncio
@pytest.mark.parametrize("faults", UNSEEN_ONES)
async def test_what_agrees_with_all_that_is_known_only_a_checksum_tells(faults: str) -> None:
    others = await run_all([faults], TABLE)
    assert others
    assert all(": b'" in other or ': b"' in other for other in others)
    right = (*TABLE[faults].right, ChecksumError)
    assert not await run_all([faults], {faults: Row(right)}, checked=True)


def test_table_has_every_fault() -> None:
    listed = {fault.partition(":")[0] for faults in TABLE for fault in faults.split("+")}
    assert listed == FAULTS.keys() - {"listing"}


BODY, GOOD = random.Random(1).randbytes(900_000), random.Random(2).randbytes(1000)
OPTIONS = Fetch(backoff_s=0.001)


class TurningLoop(asyncio.SelectorEventLoop):
    """Cancels a task at the so-manieth turn from now; turns that wait for the network count once."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._left = 0
        self._task: asyncio.Task[object] | None = None

    def cancel_after(self, turns: int, task: asyncio.Task[object]) -> None:
        self._left, self._task = turns, task

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._left -= 1
        if self._left == 0 and self._task is not None:
            self._task.cancel()


async def read(reader: Reader, url: str) -> bytes:
    return await reader.read(url)


async def read_part(reader: Reader, url: str) -> bytes:
    return await reader.read(url, 0, len(BODY))


async def fill(reader: Reader, url: str) -> bytes:
    target = bytearray(len(BODY))
    await reader.read_into(url, 0, memoryview(target))
    return bytes(target)


@pytest.mark.slow
@pytest.mark.parametrize("use", [read, read_part, fill])
@pytest.mark.parametrize(
    ("faults", "origins"),
    [
        ((), 1),
        (("reset_pre:times=1", "close_body:times=1,at=0.5", "slowdown:times=1"), 1),
        (("latency:ms=1", "short_chunked:times=1"), 1),
        (("redirect:mode=other",), 2),
    ],
    ids=["clean", "failing", "late", "redirected"],
)
def test_read_cancelled_at_any_turn_leaves_nothing_in_use(
    faults: tuple[str, ...], origins: int, use: Callable[[Reader, str], Coroutine[object, object, bytes]]
) -> None:
    with FaultServer({"good": GOOD}) as server, asyncio.Runner(loop_factory=TurningLoop) as runner:

        async def cancel_at_every_turn() -> int:
            async with Reader(OPTIONS, concurrency=1) as reader:
                for turns in range(1, 10_000):
                    url = server.add("body", BODY, *faults)
                    task = asyncio.ensure_future(use(reader, url))
                    loop.cancel_after(turns, task)
                    await asyncio.wait([task])
                    assert reader.meter.in_flight == 0
                    assert await reader.read(f"{server.url}/good") == GOOD
                    assert server.wait_until_no_connection(but=origins)
                    if not task.cancelled():
                        assert task.result() == BODY
                        return turns
            raise AssertionError("the read never came to its end")

        loop = runner.get_loop()
        assert isinstance(loop, TurningLoop)
        assert runner.run(cancel_at_every_turn()) > 5
        assert server.wait_until_no_connection()
