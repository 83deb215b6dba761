"""Shards of all packings, alone and combined: exact on one rank and on two, resumed anywhere."""

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
from builders.loops import flat, loaded, rest_of, resumed_anywhere, state_after
from builders.packed import seekable
from builders.tars import number_of, numbered_samples, tar

import headrace as hr
from headrace.fetch.stores import memory
from headrace.sources import bodies

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


Halves = tuple[hr.Stream, hr.Stream]  # the samples of the first three shards, and of the others


def halves(urls: Sequence[str], index: Any = "auto") -> Halves:
    return hr.stream(urls[:3], index=index).map(number_of), hr.stream(urls[3:], index=index).map(number_of)


def mixed(of: Halves) -> hr.Stream:
    return hr.mix({"a": of[0], "b": of[1]}, {"a": 18, "b": 14})


USES: dict[str, tuple[Callable[[Halves], hr.Stream], Sequence[int]]] = {
    "concat": (lambda of: of[0].concat(of[1]), range(TOTAL)),
    "interleave": (lambda of: of[0].interleave(of[1], block=3), range(TOTAL)),
    "mix": (mixed, range(TOTAL)),
    "zip": (lambda of: of[0].zip(of[1], strict=False).map(sum), range(18, 18 + 2 * 14, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_combined_shards_are_exact(kind: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls, (combined, expected) = shards(tmp_path, kind), USES[use]
    for index, world in ((None, 1), (None, 2), ("build", 2)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{index}{world}"))
        assert each_once(combined(halves(urls, index)), world) == Counter(expected)


def each_once(data: hr.Stream, world: int) -> Counter[int]:
    parts = []
    for rank in range(world):
        options: dict[str, Any] = {
            "ranks": hr.Ranks(global_batch_size=6, rank=rank, world_size=world),
        }
        (part,) = resumed_anywhere(lambda options=options: hr.DataLoader(data, **options), most=3)
        parts.append(part)
    assert len(set(map(len, parts))) == 1
    return Counter(itertools.chain(*itertools.chain(*parts)))


@pytest.mark.parametrize("kind", KINDS)
def test_unindexed_shards_are_exact_on_two_ranks(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = hr.stream(shards(tmp_path, kind), index=None)
    for order in (data, data.shuffle(window=5), data.take(TOTAL)):
        assert each_once(order.map(number_of), 2) == Counter(range(TOTAL))
    assert "2 ranks share an index of the shards" in caplog.text
    assert "`headrace index` makes it once for all" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "frames.jsonl.zst", "tar"])
def test_global_shuffle_makes_an_index(
    kind: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = hr.stream(shards(tmp_path, kind), index=None).shuffle("global").map(number_of)
    assert not list(cache.glob("headrace/indexes/*.hri"))  # before anything is read
    (message,) = [record.message for record in caplog.records]
    for world in (1, 2):
        assert each_once(data, world) == Counter(range(TOTAL))
    assert [record.message for record in caplog.records] == [message]
    assert "needs an index of the shards" in message
    assert "`headrace index`" in message


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "frames.jsonl.zst"])
def test_packed_documents_of_compressed_shards_are_those_of_plain_ones(kind: str, tmp_path: Path) -> None:
    packed = [
        hr.stream(shards(tmp_path, each), index=index).tokenize(lambda text: [1, *text.encode()]).pack(4)
        for each, index in (("jsonl", "build"), (kind, None))
    ]
    options: dict[str, Any] = {"batch_size": 2, "drop_last": True}
    plain, compressed = (resumed_anywhere(lambda data=data: hr.DataLoader(data, **options), most=4) for data in packed)
    assert plain == compressed


def test_ranks_that_mix_compressed_shards_resume_as_fewer(tmp_path: Path) -> None:
    data = mixed(halves(shards(tmp_path, "jsonl.gz")))
    two = [hr.Ranks(global_batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    state = state_after(hr.DataLoader(data, ranks=two[0]), 3)
    rest = flat(rest_of(hr.DataLoader(data, ranks=hr.Ranks(global_batch_size=6), collate_fn=list), state))
    first = flat(flat(loaded(data, ranks=ranks, collate_fn=list))[:9] for ranks in two)
    assert Counter(rest) == Counter(range(TOTAL)) - Counter(first)


MANY = 20_000  # lines of some 100 bytes each


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> hr.Stream:
    monkeypatch.setattr(bodies, "_SHARD_BYTES", 2**16)
    body = b"".join(b'{"cls": %d, "text": "%s"}\n' % (n, b"x" * 80) for n in range(MANY))
    memory.put("memory://in-order/large.jsonl.gz", gzip.compress(body, 1))
    return hr.stream("memory://in-order/large.jsonl.gz", index="build").map(number_of)


def test_distant_positions_are_unpacked_once_each(large: hr.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Counted(bodies._Unpacking):
        def __init__(self, *args: Any) -> None:
            started.append(args)
            super().__init__(*args)

    monkeypatch.setattr(bodies, "_Unpacking", Counted)
    apart = {str(k): large.skip(MANY // 5 * k) for k in range(3)}
    with hr.DataLoader(hr.mix(apart, dict.fromkeys("012", 1))) as loader:
        found = [int(n) for batch in itertools.islice(loader, 3000) for n in batch]
    assert sorted(found) == sorted(MANY // 5 * k + n for k in range(3) for n in range(1000))
    assert len(started) <= 6


def test_random_access_to_large_compressed_shards_is_refused(large: hr.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_STEP_BYTES", 2**15)
    monkeypatch.setattr(bodies, "_JUMPS_MOST", 3)

    async def get() -> None:
        for n in (MANY - 1, MANY // 2, MANY // 3, MANY // 4, MANY // 5):
            assert await large.aget(n) == n

    with pytest.raises(hr.OptionError, match=r"random places, and it can only be unpacked from its start.*`headrace"):
        asyncio.run(get())
