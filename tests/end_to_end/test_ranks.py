"""Ranks divide every step among themselves, evenly where asked. Options that would make them unequal are refused."""

import asyncio
import gzip
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.loops import assert_refused, flat, lists, loaded, rest_of, resumed_anywhere, state_after, words
from builders.numbers import Made, Numbers, streamed
from builders.ranks import as_rank, steps_of
from builders.tars import number_of, numbered_samples, numbers_of, put_index, put_indexed, put_shards, tar

import headrace as hr
from headrace.fetch.stores import memory

COUNTS = (9, 0, 14, 1, 30, 6, 2)
TOTAL, FIFTY = sum(COUNTS), range(50)


def batches_of(data: Any, rank: int, world: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    ranks = as_rank(rank, world, options.pop("ranks", None))
    options = {"batch_size": 4} | options if ranks.global_batch_size is None else options
    options = {"memory_budget": "8MiB"} | options  # tiny samples without end are read ahead up to it
    with hr.DataLoader(data, ranks=ranks, collate_fn=numbers_of, **options) as loader:
        return [batch for _ in range(epochs) for batch in loader]


def global_steps(data: Any, world: int, **options: Any) -> list[list[int]]:
    parts = [batches_of(data, rank, world, **options) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1, "ranks make different numbers of steps"
    assert all(batch for part in parts for batch in part), "a rank has nothing to do"
    return [flat(step) for step in zip(*parts, strict=True)]


def test_tail_decides_about_a_short_last_step() -> None:
    data = Numbers(22)
    short = global_steps(data, 2, ranks=hr.Ranks(global_batch_size=8))
    assert [len(step) for step in short] == [8, 8, 6]
    dropped = global_steps(data, 2, ranks=hr.Ranks(global_batch_size=8, last_batch="drop"))
    assert dropped == short[:2] == global_steps(data, 2, ranks=hr.Ranks(global_batch_size=8), drop_last=True)
    padded = global_steps(data, 2, ranks=hr.Ranks(global_batch_size=8, last_batch="pad"))
    assert padded[:2] == short[:2]
    assert sorted(padded[2]) == sorted(short[2] + [0, 1])
    carried = global_steps(data, 2, ranks=hr.Ranks(global_batch_size=8, last_batch="carry"), epochs=3)
    assert [len(step) for step in carried] == [8] * 8
    assert sorted(flat(carried)) == sorted([*range(22)] * 2 + [*range(20)])
    assert sorted(carried[2]) == [0, 1, 16, 17, 18, 19, 20, 21]


@pytest.mark.parametrize(("tail", "told"), [("pad", (2, 0)), ("drop", (0, 6)), ("carry", (0, 6)), ("short", (0, 0))])
def test_repeated_and_dropped_samples_are_reported(tail: Any, told: tuple[int, int]) -> None:
    with hr.DataLoader(Numbers(22), batch_size=8, ranks=hr.Ranks(last_batch=tail)) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
        assert (stats.repeated, stats.left_out) == told
        assert ("tail" in loader.report()) == any(told)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_get_as_many_single_samples_each(workers: int) -> None:
    def given(count: int, last_batch: Any = None, **options: Any) -> list[list[int]]:
        options |= {"batch_size": None, "num_workers": workers}
        ranks = [hr.Ranks(rank=rank, world_size=4, last_batch=last_batch) for rank in range(4)]
        return [loaded(Numbers(count), ranks=one, **options) for one in ranks]

    for prefetch in (None, 0):  # together, or each by itself
        assert given(8, prefetch_factor=prefetch) == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert given(10, "drop", prefetch_factor=prefetch) == [[0, 4], [1, 5], [2, 6], [3, 7]]
        padded = given(10, "pad", prefetch_factor=prefetch)
        assert [len(part) for part in padded] == [3] * 4
        assert sorted(itertools.chain(*padded)) == sorted([*range(10), 0, 1])
        with pytest.raises(hr.OptionError, match="2 samples are left of the epoch for 4 ranks"):
            given(10, prefetch_factor=prefetch)


def is_even(sample: Any) -> bool:
    return int(sample["__key__"]) % 2 == 0


@pytest.mark.slow
def test_ranks_repeat_filtered_samples_for_an_epoch_of_a_given_size() -> None:
    data = put_indexed("ranks", COUNTS).shuffle().filter(is_even)
    steps = global_steps(data.epoch(samples=24), 2)
    assert steps == global_steps(data.repeat().epoch(samples=24), 2)
    assert [len(step) for step in steps] == [8, 8, 8]
    assert len({number for step in steps for number in step}) == 24
    long = flat(global_steps(data.epoch(samples=96), 3))
    assert len(long) == 96
    assert set(long) == set(range(0, TOTAL, 2))


def test_ranks_read_shards_of_their_own_where_samples_are_not_counted() -> None:
    urls = put_shards("dealt", COUNTS)
    data = hr.stream(urls, index=None).shuffle(window=8).epoch(samples=200)
    steps = global_steps(data, 2, batch_size=5)
    assert [len(step) for step in steps] == [10] * 20
    first, second = (set(flat(batches_of(data, rank, 2))) for rank in range(2))
    assert len(first | second) == TOTAL
    with pytest.raises(hr.OptionError, match="7 shards for 8 ranks"):
        batches_of(data, 0, 8)


def test_global_batch_of_a_state_is_kept_in_later_epochs_and_after_a_second_resume() -> None:
    def loader_of(world: int) -> hr.DataLoader[Any]:
        return hr.DataLoader(Numbers(64), batch_size=4, ranks=hr.Ranks(rank=0, world_size=world))

    state = state_after(loader_of(4), 1)
    for _ in range(2):
        with loader_of(2) as loader:
            loader.load_state_dict(state)
            batches = iter(loader)
            assert len(next(batches)) == 8
            state = loader.state_dict()
            assert [len(batch) for batch in batches] == [8] * (4 - loader.position.batch) or loader.epoch == 1
            assert [len(batch) for batch in loader] == [8] * 4
            assert len(loader) == 4


@pytest.mark.parametrize("is_indexed", [True, False])
def test_each_epoch_reads_its_ranks_from_the_environment(is_indexed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards without an index get one when an epoch has several ranks."""
    monkeypatch.delenv("RANK", raising=False)
    data = Numbers(8) if is_indexed else hr.stream(put_shards("ranks-come-later", (5, 3)), index=None).map(number_of)
    with hr.DataLoader(data, batch_size=2) as loader:
        assert len(list(loader)) == 4
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert lists(loader) == [[2, 3], [6, 7]]


def test_batch_without_samples_is_an_error_when_other_ranks_have_some() -> None:
    class Failing(Numbers):
        async def aget(self, key: int) -> int:
            if 8 <= key < 12:
                raise ValueError(f"bad {key}")
            return key

    assert len(loaded(Failing(32), batch_size=4, errors=hr.Skip())) == 7
    with hr.DataLoader(Failing(32), 4, ranks=hr.Ranks(rank=0, world_size=2), errors=hr.Skip()) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(ValueError, match="bad 8") as caught:
            next(batches)
        assert "other ranks have theirs" in caught.value.__notes__[-1]
        assert len(list(batches)) == 2


TWO: dict[str, Any] = {"batch_size": 4, "ranks": hr.Ranks(rank=0, world_size=2)}
UNEVEN_TWO = {**TWO, "ranks": hr.Ranks(rank=0, world_size=2, last_batch="uneven")}
COUNTED = "last_batch='uneven'.*count the samples of all ranks"
UNSAID = r"(Silent|FromIterable).*hr\.shard_info\(\).*position.*hr\.Ranks\.none"
TORCHS = torch.utils.data.TensorDataset(torch.arange(4))


def begun(data: Any, **options: Any) -> None:
    with hr.DataLoader(data, **options) as loader:
        iter(loader)


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("whole number, 1 or more", lambda: hr.Ranks(global_batch_size=0)),
    ("one of None, 'short'", lambda: hr.Ranks(last_batch="long")),  # type: ignore[arg-type]
    ("balance='time' must be 'tokens'", lambda: hr.Ranks(balance="time")),  # type: ignore[arg-type]
    ("give one of them", lambda: begun(Numbers(70), batch_size=4, ranks=hr.Ranks(global_batch_size=8))),
    (
        r"2 samples in a step by hr\.Ranks\(global_batch_size=2\) for 3 ranks, and each needs one",
        lambda: begun(Numbers(70), ranks=hr.Ranks(global_batch_size=2, rank=0, world_size=3)),
    ),
    ("give one of them", lambda: begun(Numbers(70), ranks=hr.Ranks(last_batch="pad"), drop_last=True)),
    ("states without snapshots", lambda: begun(Numbers(70), snapshot_every_n_steps=2)),
    (r"filter\(is_even\) changes .*epoch\(samples=N\)", lambda: begun(Numbers(70).filter(is_even), **TWO)),
    (r"epoch\(samples=N\)", lambda: begun(streamed(FIFTY, "position"), **TWO)),
    *(
        ("last_batch=", lambda make=make, tail=tail: begun(make(), ranks=hr.Ranks(last_batch=tail)))
        for make in (lambda: streamed(FIFTY, "position"), lambda: Numbers(TOTAL).filter(bool), lambda: packed())
        for tail in ("pad", "carry")
    ),
    (
        "asked again",
        lambda: begun(Numbers(9).sample(torch.utils.data.RandomSampler(range(5))), ranks=hr.Ranks(last_batch="carry")),
    ),
    (COUNTED, lambda: begun(Numbers(TOTAL).filter(bool).epoch(samples=9), **UNEVEN_TWO)),
    (COUNTED, lambda: begun(Numbers(TOTAL).filter(bool).take(9), **UNEVEN_TWO)),
    (COUNTED, lambda: begun(packed().take(9), **UNEVEN_TWO)),
    (COUNTED, lambda: begun(packed().epoch(samples=9), **UNEVEN_TWO)),
    ("ranks= needs a data set of headrace", lambda: begun(TORCHS, ranks=hr.Ranks.none)),
    (UNSAID, lambda: ranks(Silent().epoch(samples=8), 2)),
    (UNSAID, lambda: ranks(hr.from_iterable([1, 2]).epoch(samples=2), 2)),
    (UNSAID, lambda: ranks(Silent(), 2)),
    (UNSAID, lambda: ranks(Silent().filter(bool), 2)),
    (r"Lying .*without asking hr\.shard_info\(\)", lambda: ranks(Lying().epoch(samples=8), 2)),
    ("ranks_by='worker'", lambda: ranks(Wrong().epoch(samples=8), 2)),
    ("or a function that returns one", lambda: hr.from_iterable(5)),  # type: ignore[arg-type]
    (r"epoch\(samples=N\)", lambda: ranks(Endless(), 2)),
    (r"epoch\(samples=N\)", lambda: ranks(Endless().take(8), 2)),
    (r"epoch\(samples=N\)", lambda: ranks(Endless().epoch(samples=8).filter(is_some), 2)),
]


@pytest.mark.parametrize(("text", "use"), REFUSED)
def test_wrong_options_and_data_are_refused_on_ranks(text: str, use: Callable[[], Any]) -> None:
    with pytest.raises(hr.OptionError, match=text):
        use()


@pytest.mark.slow
def test_a_missing_shard_shifts_no_sample_of_others() -> None:
    urls = put_shards("one is missing", COUNTS)
    data = hr.stream(urls, index=put_index(urls)).shuffle(seed=2)
    expected = global_steps(data, 2, ranks=hr.Ranks(global_batch_size=6))
    memory.remove(urls[2])
    lost = set(range(9, 23))
    for rank in range(2):
        own = [step[len(step) // 2 :] if rank else step[: len(step) // 2] for step in expected]
        ranks = hr.Ranks(global_batch_size=6, rank=rank, world_size=2)
        with hr.DataLoader(data, ranks=ranks, collate_fn=numbers_of, errors=hr.Skip()) as loader:
            assert list(loader) == [kept for step in own if (kept := [n for n in step if n not in lost])]
            assert loader.stats().skipped == sum(number in lost for number in flat(own))


class Parts(hr.AsyncIterableDataset):
    ranks_by = "shard_info"

    async def aiter(self) -> Any:
        part = hr.shard_info()
        for n in range(50):
            if n % 9 % part.world == part.rank:
                yield n


def packed_urls(counts: Sequence[int]) -> list[str]:
    urls = [f"memory://ranks-uneven/{number}.tar.gz" for number in range(len(counts))]
    for url, first, count in zip(urls, itertools.accumulate(counts, initial=0), counts, strict=False):
        memory.put(url, gzip.compress(tar(numbered_samples(first, count))))
    return urls


def packed() -> hr.Stream:
    return hr.stream(packed_urls(COUNTS), index=None)


UNEVEN: dict[str, tuple[Callable[[], Any], Iterable[int]]] = {
    "filter": (lambda: Numbers(TOTAL).shuffle().filter(lambda n: n % 5 < 2), [n for n in range(TOTAL) if n % 5 < 2]),
    "filtered epoch": (lambda: Numbers(TOTAL).epoch(samples=40).filter(lambda n: n % 3 == 0), range(0, 40, 3)),
    "nothing is left": (lambda: Numbers(TOTAL).filter(lambda n: n == 7), [7]),
    "known count": (lambda: Numbers(9), range(9)),
    "fewer samples than ranks": (lambda: Numbers(2), range(2)),
    "compressed shards": (lambda: packed().shuffle(window=8), range(TOTAL)),
    "fewer shards than ranks": (lambda: hr.stream(packed_urls([9]), index=None), range(9)),
    "iterable": (Parts, range(50)),
    "iterable by position": (lambda: streamed(FIFTY, "position"), range(50)),
    "filtered iterable by position": (
        lambda: streamed(FIFTY, "position").filter(lambda n: n % 7 == 0),
        range(0, 50, 7),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNEVEN)
def test_ranks_end_with_their_own_data_when_the_tail_is_uneven(case: str) -> None:
    make, expected = UNEVEN[case]
    for world in (1, 2, 3):
        found: list[int] = []
        for rank in range(world):
            batches = batches_of(make(), rank, world, batch_size=2, ranks=hr.Ranks(last_batch="uneven"))
            assert all(batches)
            found += itertools.chain(*batches)
        assert sorted(found) == list(expected)


SHARED: dict[str, Callable[[], Any]] = {
    "shards": lambda: hr.stream(packed_urls([9, 1, 11, 10]), index=None).epoch(samples=31),
    "shuffled shards": lambda: hr.stream(packed_urls([9, 1, 11, 10]), index=None).shuffle(window=4).epoch(samples=70),
    "even shards": lambda: hr.stream(packed_urls([9, 2, 11, 9]), index=None).filter(is_even).epoch(samples=16),
    "filter": lambda: Numbers(31).filter(lambda n: n % 4 < 2 or n < 9).epoch(samples=20),
    "shuffled filter": lambda: Numbers(31).shuffle().filter(lambda n: n < 20).epoch(samples=20),
    "filter of few": lambda: Numbers(31).filter(lambda n: n % 4 == 0).epoch(samples=8),
    "many of one": lambda: Numbers(31).flat_map(lambda n: [n, n + 100][: n % 3]).epoch(samples=30),
}


@pytest.mark.parametrize("case", SHARED)
def test_repeated_and_unread_samples_are_counted(case: str, caplog: pytest.LogCaptureFixture) -> None:
    found, repeated, unread = Counter[int](), 0, 0
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": numbers_of, "num_workers": 0, "memory_budget": "8MiB"}
    for rank in range(3):
        caplog.clear()
        with hr.DataLoader(SHARED[case](), ranks=hr.Ranks(rank=rank, world_size=3), **options) as loader:
            found.update(itertools.chain(*loader))
            stats = loader.stats()
            assert ("were repeated" in caplog.text) == bool(stats.repeated + stats.unread)
            list(loader)
            assert caplog.text.count("were repeated") <= 1
        repeated, unread = repeated + stats.repeated, unread + stats.unread
    again = found.total() - len(found)
    assert repeated == again or (case == "shuffled filter" and repeated >= again)
    assert unread or "filter" not in case or not again
    assert repeated


def lines_in(folder: Path, counts: Sequence[int]) -> hr.Stream:
    urls = [str(folder / f"{number}.jsonl.gz") for number in range(len(counts))]
    for url, first, count in zip(urls, itertools.accumulate(counts, initial=0), counts, strict=False):
        with gzip.open(url, "wt") as file:
            file.writelines(f'{{"n": {number}}}\n' for number in range(first, first + count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        data = hr.stream(urls, index="build").map(lambda sample: int(sample["n"]))
        assert len(data) == sum(counts)  # the index is made now
        return data


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> hr.Stream:
    return lines_in(tmp_path_factory.mktemp("lines"), COUNTS)


EXACT: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Iterable[int]]] = {
    "whole": (lambda data: data, {}, range(TOTAL)),
    "all of them": (lambda data: data.epoch(samples=TOTAL), {}, range(TOTAL)),
    "fewer": (lambda data: data.epoch(samples=41), {}, range(41)),
    "taken": (lambda data: data.take(17), {}, range(17)),
    "more": (lambda data: data.epoch(samples=2 * TOTAL + 9), {}, [*range(TOTAL), *range(TOTAL), *range(9)]),
    "repeated": (lambda data: data.repeat(3), {}, [*range(TOTAL)] * 3),
    "dropped": (lambda data: data, {"ranks": hr.Ranks(last_batch="drop"), "batch_size": 6}, range(60)),
    "uneven": (lambda data: data, {"ranks": hr.Ranks(last_batch="uneven")}, range(TOTAL)),
    "windows": (lambda data: data.shuffle(window=7), {}, range(TOTAL)),
    "shuffled shards": (lambda data: data.shuffle("shards").repeat(2), {}, [*range(TOTAL)] * 2),
}


@pytest.mark.parametrize("case", EXACT)
def test_ranks_share_compressed_shards_exactly_when_an_index_has_their_counts(lines: hr.Stream, case: str) -> None:
    of, given, expected = EXACT[case]
    for world in (2, 5):
        found, steps = Counter[int](), set[int]()
        for rank in range(world):
            options: dict[str, Any] = {"batch_size": 2, "collate_fn": numbers_of, "num_workers": 0, **given}
            options["ranks"] = as_rank(rank, world, given.get("ranks"))
            with hr.DataLoader(of(lines), **options) as loader:
                batches = iter(loader)
                got = list(itertools.islice(batches, 2))
                state = loader.state_dict()
                got += batches
                assert (loader.stats().repeated, loader.stats().unread) == (0, 0)
                assert len(loader) == len(got)
            assert rest_of(hr.DataLoader(of(lines), **options), state) == got[2:]
            found.update(itertools.chain(*got))
            steps.add(len(got))
        assert found == Counter(expected)
        assert len(steps) == 1 or case == "uneven"


def test_states_of_shares_by_counts_are_refused_by_other_ranks_and_steps(lines: hr.Stream) -> None:
    state = state_after(hr.DataLoader(lines, 4, ranks=hr.Ranks(rank=0, world_size=2), collate_fn=numbers_of), 1)
    for field, options in (
        ("world_size", {"batch_size": 4, "ranks": hr.Ranks(rank=1, world_size=2)}),
        ("world_size", {"batch_size": 4, "ranks": hr.Ranks(rank=0, world_size=3)}),
        ("global_batch_size", {"batch_size": 5, "ranks": hr.Ranks(rank=0, world_size=2)}),
        ("order", {"batch_size": 4}),
    ):
        assert_refused(hr.DataLoader(lines, **options), state, field=field)


def test_shard_with_fewer_samples_than_indexed_is_an_error_without_an_uneven_tail(tmp_path: Path) -> None:
    data = lines_in(tmp_path, (5, 7, 6))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(b""))
    options: dict[str, Any] = {"errors": hr.Skip(), "batch_size": 3}
    with pytest.raises(hr.OptionError, match=r"rank 0 of 2 after . of 3 batches.*their index"):
        batches_of(data, 0, 2, **options)
    uneven = batches_of(data, 0, 2, ranks=hr.Ranks(last_batch="uneven"), **options)
    assert list(itertools.chain(*uneven)) == list(range(5))


@pytest.mark.parametrize(("times", "has"), [(None, "shards for 3 ranks"), (2, None)])
def test_rank_without_a_shard_ends_with_an_uneven_tail(times: int | None, has: str | None, tmp_path: Path) -> None:
    for shard, count in enumerate((3, 0)):
        (tmp_path / f"{shard}.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n' * count))
    data = hr.stream(str(tmp_path / "*.jsonl.gz"), index=None).repeat(times)
    options = {"batch_size": 2, "ranks": hr.Ranks(rank=2, world_size=3, last_batch="uneven")}
    if has is None:
        assert loaded(data, **options) == []
        return
    with pytest.raises(hr.OptionError, match=has):
        loaded(data, **options)


pytestmark = pytest.mark.usefixtures("warm_server")


class Endless(hr.AsyncIterableDataset):
    ranks_by = "shard_info"

    async def aiter(self) -> AsyncIterator[int]:
        part = hr.shard_info()
        for number in itertools.count(part.rank, part.world):
            yield number


class Resumed(Endless):
    """A data set that continues from a state once, and then starts again."""

    def __init__(self) -> None:
        self.next, self.is_loaded = 0, False

    def start(self) -> int:
        self.next, self.is_loaded = self.next if self.is_loaded else 0, False
        return self.next

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.is_loaded = state["next"], True


class Stateful(Resumed):
    async def aiter(self) -> AsyncIterator[int]:
        part = hr.shard_info()
        for turn in itertools.count(self.start()):
            self.next = turn + 1
            yield 1000 * part.epoch + part.rank + turn * part.world


class Same(Resumed):
    """Equal numbers on all ranks, with random ones. They continue from a state."""

    ranks_by = "position"

    def __init__(self, count: int = 10**6) -> None:
        super().__init__()
        self.count = count

    async def aiter(self) -> AsyncIterator[tuple[int, int]]:  # type: ignore[override]
        assert hr.shard_info().world == 1, "it gives all"
        for number in range(self.start(), self.count):
            self.next = number + 1
            yield number, int(hr.rng().integers(1 << 30))


def loader_of(data: Any, rank: int, world: int, **options: Any) -> hr.DataLoader[Any]:
    ranks = options.pop("ranks", None) or hr.Ranks()
    options = {"batch_size": 4, **options} if ranks.global_batch_size is None else options
    return hr.DataLoader(data, ranks=as_rank(rank, world, ranks), collate_fn=list, **options)


def ranks(data: Any, world: int, **options: Any) -> list[list[Any]]:
    parts = []
    for rank in range(world):
        with loader_of(data() if callable(data) else data, rank, world, **options) as loader:
            parts.append(list(loader))
    return parts


def test_part_is_known_to_aiter_and_to_its_threads_and_tasks() -> None:
    seen = []

    class Asking(Endless):
        async def aiter(self) -> AsyncIterator[int]:
            part = await asyncio.to_thread(hr.shard_info)
            assert hr.shard_info() == await asyncio.create_task(self.ask()) == part
            seen.append(part)
            yield part.rank

        async def ask(self) -> hr.ShardInfo:
            return hr.shard_info()

    with hr.DataLoader(Asking(), seed=5) as loader:
        assert list(loader) == list(loader) == [0]
    for rank in range(2):
        with loader_of(Asking().epoch(samples=2), rank, 2, seed=6, batch_size=1) as loader:
            loader.set_epoch(3)
            assert list(loader) == [[rank]]
    assert loaded(Asking(), batch_size=4, collate_fn=list, ranks=hr.Ranks.none) == [[0]]
    assert seen == [
        *(hr.ShardInfo(0, 1, epoch, 5) for epoch in range(2)),
        *(hr.ShardInfo(rank, 2, 3, 6) for rank in range(2)),
        hr.ShardInfo(0, 1, 0, 0),
    ]
    with pytest.raises(hr.OptionError, match="needs a call inside the aiter"):
        hr.shard_info()


def plain() -> Iterator[int]:
    part = hr.shard_info()
    return iter(range(part.rank, 10**6, part.world))


class Plain:
    def __iter__(self) -> Iterator[int]:
        return plain()


DIVIDED: dict[str, Callable[[], Any]] = {
    "asynchronous": Endless,
    "plain": lambda: hr.from_iterable(Plain(), ranks_by="shard_info").map(int),
    "function": lambda: hr.from_iterable(plain, ranks_by="shard_info").map(int),
}


@pytest.mark.parametrize("kind", DIVIDED)
@pytest.mark.parametrize("world", [2, 3])
def test_samples_come_once_when_an_iterable_divides_them_itself(kind: str, world: int) -> None:
    parts = ranks(DIVIDED[kind]().epoch(samples=60), world)
    assert len(set(map(len, parts))) == 1
    assert sorted(flat(flat(parts))) == list(range(60))
    parts = ranks(DIVIDED[kind]().filter(is_some).epoch(samples=48), world)
    assert len(set(map(len, parts))) == 1
    assert len(set(flat(flat(parts)))) == len(flat(flat(parts))) == 48
    assert all(map(is_some, flat(flat(parts))))


def is_some(number: int) -> bool:
    return number % 5 != 0


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["short", "drop"])
@pytest.mark.parametrize("count", [48, 49, 53])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_the_global_batches_of_one_when_they_divide_by_position(world: int, count: int, tail: Any) -> None:
    """With the random numbers of one, too."""
    (alone,) = ranks(Same().epoch(samples=count), 1, ranks=hr.Ranks(global_batch_size=12, last_batch=tail))
    parts = ranks(Same().epoch(samples=count), world, ranks=hr.Ranks(global_batch_size=12, last_batch=tail))
    steps = [flat(list(step)) for step in zip(*parts, strict=True)]
    assert flat(steps) == flat(alone)
    assert steps[:3] == alone[:3]


class Silent(Endless):
    ranks_by = None


class Lying(Endless):
    async def aiter(self) -> AsyncIterator[int]:
        for number in range(8):
            yield number


class Wrong(Endless):
    ranks_by = "worker"  # type: ignore[assignment]


def test_iterables_that_do_not_divide_their_samples_serve_one_rank_or_all() -> None:
    alone = loaded(Silent().take(8), batch_size=4, collate_fn=list, ranks=hr.Ranks.none)
    assert flat(alone) == list(range(8))
    assert ranks(Lying().epoch(samples=8), 1, batch_size=8) == [[list(range(8))]]


@pytest.mark.parametrize("data", [Same(20), Same(20).filter(bool)])
def test_rank_raises_when_its_samples_end_before_the_epoch_does(data: Any) -> None:
    got = list[Any]()
    with loader_of(data.epoch(samples=24), 1, 2) as loader, pytest.raises(hr.OptionError, match="rank 1 of 2 after"):
        got.extend(loader)
    assert len(got) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("data", [Stateful, Same])
@pytest.mark.parametrize("world", [2, 3])
def test_rank_goes_on_exactly_from_its_own_state(data: Any, world: int) -> None:
    for rank in range(world):
        make = lambda rank=rank, **more: loader_of(data().epoch(samples=60), rank, world, **more)
        resumed_anywhere(make, resume=lambda make=make: make(num_workers=1), epochs=2, most=5)


@pytest.mark.parametrize("data", [Stateful, Same])
def test_state_of_a_rank_is_refused_by_others_and_says_why(data: Any) -> None:
    make = lambda: data().epoch(samples=60)
    state = state_after(loader_of(make(), 1, 2), 1)
    for rank, world in ((0, 2), (0, 1), (1, 3)):
        assert_refused(loader_of(make(), rank, world), state, match="iterable have no numbers", field="world_size")


class Other(Same):
    ranks_by = "shard_info"


Other.__name__ = "Same"


@pytest.mark.parametrize(
    ("data", "size", "match"), [(Same, 10, "global batches of 8"), (Other, 8, "another state|the data|ranks")]
)
def test_state_is_refused_when_ranks_divide_in_another_way(data: Any, size: int, match: str) -> None:
    state = state_after(loader_of(Same().epoch(samples=60), 1, 2, ranks=hr.Ranks(global_batch_size=8)), 2)
    other = loader_of(data().epoch(samples=60), 1, 2, ranks=hr.Ranks(global_batch_size=size))
    assert_refused(other, state, match=match)


def test_iterable_of_the_callers_loop_knows_its_part() -> None:
    class OfTheCaller(Endless):
        loop = "caller"

        async def aiter(self) -> AsyncIterator[int]:
            assert threading.current_thread() is threading.main_thread()
            async for number in super().aiter():
                yield number

    async def read(rank: int) -> list[int]:
        async with loader_of(OfTheCaller().epoch(samples=8), rank, 2) as loader:
            return flat([batch async for batch in loader])

    assert [asyncio.run(read(rank)) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


# Global batches dealt to ranks so that these have as much work: the batches stay what they were.

LENGTHS = np.maximum(1, np.random.default_rng(3).lognormal(3.0, 1.0, 400).astype(np.int64))
LENGTH = 128


def document(key: int) -> dict[str, Any]:
    return {"input_ids": np.full(LENGTHS[key], key, np.int32), "number": key}


def no_work(numbers: Any) -> Any:
    raise ZeroDivisionError


def rows_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(map(tuple, row)) for row in zip(*(batch[name].tolist() for name in sorted(batch)), strict=True)]


def loaders_of(
    data: Any, world: int, size: int = 16, balance: Any = None, *, in_order: bool = True
) -> list[hr.DataLoader[Any]]:
    ranks = hr.Ranks(global_batch_size=size, balance=balance, compare=False)
    return [
        hr.DataLoader(data, ranks=as_rank(rank, world, ranks), timeout=30, in_order=in_order) for rank in range(world)
    ]


def squares(row: tuple[Any, ...]) -> int:
    """The tokens of each of a sequence's documents, squared."""
    ids = np.array(row[0])
    return int((np.bincount(ids[ids >= 0]) ** 2).sum())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_packed_sequences_are_even_and_the_steps_are_the_same(method: Any, is_shuffled: bool) -> None:
    documents = Made(document, len(LENGTHS))
    data = (documents.shuffle() if is_shuffled else documents).pack(LENGTH, lengths=LENGTHS, method=method)
    whole = [rows_of(batch) for batch in loaders_of(data, 1)[0]]
    steps = [list(map(rows_of, batches)) for batches in steps_of(loaders_of(data, 4, balance="tokens^2"))]
    assert [sorted(itertools.chain(*step)) for step in steps] == [sorted(step) for step in whole]
    assert all([len(mine) for mine in step] == [4] * 4 for step in steps[:-2])
    loads = np.array([[sum(map(squares, mine)) for mine in step] for step in steps[:-2]])
    assert (loads.max(axis=1) <= 1.15 * loads.mean(axis=1)).all()  # of four each
    in_turn = np.array([[sum(map(squares, step[k : k + 4])) for k in range(0, 16, 4)] for step in whole[:-2]])
    assert loads.max(axis=1).sum() < 0.9 * in_turn.max(axis=1).sum()


def test_function_gives_the_work_of_samples() -> None:
    (loader,) = loaders_of(hr.from_map(range(20)), 1, 10, np.sqrt)
    assert lists(loader) == [[*range(10)], [*range(10, 20)]]
    loaders = loaders_of(hr.from_map(range(64)), 2, 8, lambda numbers: numbers**2)
    for mine, others in steps_of(loaders):
        assert abs(int((mine**2).sum() - (others**2).sum())) <= 0.02 * int((mine**2).sum() + 100)


def test_states_do_not_depend_on_the_balance() -> None:
    data = hr.from_map(range(60)).shuffle()
    whole = [sorted(batch.tolist()) for (batch,) in steps_of(loaders_of(data, 1, 12))]
    loaders = loaders_of(data, 3, 12, lambda numbers: numbers)
    steps_of(loaders, 2)
    (state,) = {json.dumps(loader.state_dict()) for loader in loaders}
    for world, balance in ((2, None), (4, np.sqrt)):
        loaders = loaders_of(data, world, 12, balance)
        for loader in loaders:
            loader.load_state_dict(json.loads(state))
        assert [sorted(itertools.chain(*(one.tolist() for one in step))) for step in steps_of(loaders)] == whole[2:]


@pytest.mark.parametrize(
    ("data", "options", "why"),
    [
        (hr.from_map(range(60)), {"balance": "tokens"}, "only once they are read"),
        (hr.from_map(range(60)), {"balance": lambda _: [1]}, "result of balance"),
        (hr.from_map(range(60)), {"balance": lambda numbers: -numbers}, "0 or more"),
        (hr.from_map(range(60)), {"balance": np.sqrt, "in_order": False}, "in order"),
        (hr.from_map(range(60)).filter(bool).epoch(samples=9), {"balance": np.sqrt}, "balance"),
        (hr.from_map(range(60)), {"balance": no_work}, "no_work. was asked for the work of 8 samples"),
    ],
)
def test_what_cannot_be_balanced_is_an_error(data: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises((hr.OptionError, ZeroDivisionError)) as caught:
        next(iter(loaders_of(data, 2, 8, **options)[0]))
    assert re.search(why, words(caught.value))
