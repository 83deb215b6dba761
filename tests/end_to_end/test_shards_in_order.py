"""Shards of all packings, alone and combined: exact on one rank and on two, resumed anywhere."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from builders.loops import rest_of, resumed_anywhere, state_after
from end_to_end.packed import seekable
from end_to_end.tars import numbered_samples, tar

import headrace as hr
from headrace.fetch.stores import memory
from headrace.sources import unpacking

COUNTS = (11, 0, 7, 1, 13)
TOTAL = sum(COUNTS)


def lines(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"cls": n, "text": "x" * (n % 5)}).encode() + b"\n" for n in range(first, first + count))


def tarred(first: int, count: int) -> bytes:
    return tar(numbered_samples(first, count))


KINDS: dict[str, Callable[[int, int], bytes]] = {
    "jsonl": lines,
    "jsonl.gz": lambda *shard: gzip.compress(lines(*shard)),
    "jsonl.zst": lambda *shard: zstandard.compress(lines(*shard)),
    "frames.jsonl.zst": lambda *shard: seekable(lines(*shard), 100),
    "tar": tarred,
    "tar.gz": lambda *shard: gzip.compress(tarred(*shard)),
}


def shards(folder: Path, kind: str) -> list[str]:
    urls = [str(folder / f"{number}.{kind}") for number in range(len(COUNTS))]
    for url, first, count in zip(urls, itertools.accumulate(COUNTS, initial=0), COUNTS, strict=False):
        Path(url).write_bytes(KINDS[kind](first, count))
    return urls


def number(sample: Any) -> int:
    return int(sample["cls"])


Halves = tuple[hr.Stream, hr.Stream]  # the samples of the first three shards, and of the others

USES: dict[str, tuple[Callable[[Halves], hr.Stream], Sequence[int]]] = {
    "concat": (lambda of: of[0].concat(of[1]), range(TOTAL)),
    "interleave": (lambda of: of[0].interleave(of[1], block=3), range(TOTAL)),
    "mix": (lambda of: hr.mix({"a": of[0], "b": of[1]}, {"a": 18, "b": 14}), range(TOTAL)),
    "zip": (lambda of: of[0].zip(of[1], strict=False).map(sum), range(18, 18 + 2 * 14, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_combined_shards_are_exact_on_one_rank_and_on_two(
    kind: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, (combined, expected) = shards(tmp_path, kind), USES[use]
    for index, world in ((None, 1), (None, 2), ("build", 2)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{index}{world}"))
        data = combined(tuple(hr.stream(some, index=index).map(number) for some in (urls[:3], urls[3:])))
        assert each_once(lambda data=data, **options: hr.DataLoader(data, **options), world) == Counter(expected)


def each_once(make: Callable[..., hr.DataLoader[Any]], world: int) -> Counter[int]:
    parts = []
    for rank in range(world):
        options: dict[str, Any] = {"global_batch_size": 6, "rank": rank, "world_size": world}
        (part,) = resumed_anywhere(lambda options=options: make(**options), most=3)
        parts.append(part)
    assert len(set(map(len, parts))) == 1
    return Counter(itertools.chain(*itertools.chain(*parts)))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_without_an_index_are_exact_on_two_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    urls = shards(tmp_path, kind)
    orders: dict[str, Callable[[hr.Stream], hr.Stream]] = {
        "in order": lambda data: data,
        "in windows": lambda data: data.shuffle(window=5),
        "taken": lambda data: data.take(TOTAL),
    }
    for order in orders.values():
        data = order(hr.stream(urls, index=None)).map(number)
        assert each_once(lambda data=data, **options: hr.DataLoader(data, **options), 2) == Counter(range(TOTAL))
    assert "2 ranks share an index of the shards" in caplog.text
    assert "`headrace index` makes it once for all" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "frames.jsonl.zst", "tar"])
def test_a_global_shuffle_makes_the_index_that_it_needs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = hr.stream(shards(tmp_path, kind), index=None).shuffle("global").map(number)
    assert not list(tmp_path.glob("headrace/indexes/*.hri"))  # before anything is read
    told = [record.message for record in caplog.records]
    for world in (1, 2):
        assert each_once(lambda **options: hr.DataLoader(data, **options), world) == Counter(range(TOTAL))
    assert [record.message for record in caplog.records] == told
    assert len(told) == 1
    assert "needs an index of the shards" in told[0]
    assert "`headrace index`" in told[0]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "frames.jsonl.zst"])
def test_packed_documents_of_compressed_shards_are_those_of_plain_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packed = [
        hr.stream(shards(tmp_path, each), index=index).tokenize(lambda text: [1, *text.encode()]).pack(4)
        for each, index in (("jsonl", "build"), (kind, None))
    ]
    options: dict[str, Any] = {"batch_size": 2, "drop_last": True}
    plain, compressed = (resumed_anywhere(lambda data=data: hr.DataLoader(data, **options), most=4) for data in packed)
    assert plain == compressed


def test_ranks_that_mix_compressed_shards_resume_as_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    urls = shards(tmp_path, "jsonl.gz")
    data = hr.mix({"a": hr.stream(urls[:3]), "b": hr.stream(urls[3:])}, {"a": 18, "b": 14}).map(number)
    options: dict[str, Any] = {"global_batch_size": 6, "world_size": 2}
    state = state_after(hr.DataLoader(data, rank=0, **options), 3)
    rest = [n for batch in rest_of(hr.DataLoader(data, global_batch_size=6), state) for n in batch.tolist()]
    whole = [[n for b in hr.DataLoader(data, rank=rank, **options) for n in b.tolist()] for rank in range(2)]
    assert Counter(rest) == Counter(range(TOTAL)) - Counter(n for part in whole for n in part[:9])


MANY = 20_000  # lines of some 100 bytes each


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hr.Stream:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory.put("memory://in-order/large.jsonl.gz", gzip.compress(b"".join(map(line, range(MANY))), 1))
    return hr.stream("memory://in-order/large.jsonl.gz", index="build").map(number)


def line(n: int) -> bytes:
    return b'{"cls": %d, "text": "%s"}\n' % (n, b"x" * 80)


def test_samples_far_apart_are_unpacked_once_for_each_place_that_goes_on(
    large: hr.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_KEPT_BYTES", 2**16)
    begun: list[Any] = []

    class Counted(unpacking._Unpacking):
        def __init__(self, *args: Any) -> None:
            begun.append(args)
            super().__init__(*args)

    monkeypatch.setattr(unpacking, "_Unpacking", Counted)
    apart = [large.skip(MANY // 5 * k) for k in range(3)]
    with hr.DataLoader(hr.mix({str(k): one for k, one in enumerate(apart)}, dict.fromkeys("012", 1))) as loader:
        found = [int(n) for batch in itertools.islice(loader, 3000) for n in batch]
    assert sorted(found) == sorted(MANY // 5 * k + n for k in range(3) for n in range(1000))
    assert len(begun) <= 6


def test_samples_at_random_places_of_large_shards_are_refused_once_that_is_seen(
    large: hr.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_KEPT_BYTES", 2**16)
    monkeypatch.setattr(unpacking, "_STEP_BYTES", 2**15)
    monkeypatch.setattr(unpacking, "_JUMPS_MOST", 3)

    async def get() -> None:
        for n in (MANY - 1, MANY // 2, MANY // 3, MANY // 4, MANY // 5):
            assert await large.aget(n) == n

    with pytest.raises(hr.OptionError, match=r"random places, and it can only be unpacked from its start.*`headrace"):
        asyncio.run(get())
