"""Ranks divide the samples of iterable data sets."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from builders.loops import assert_refused, flat, resumed_anywhere, state_after
from builders.ranks import as_rank

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_server")


class Numbers(hr.AsyncIterableDataset):
    ranks_by = "shard_info"

    async def aiter(self) -> AsyncIterator[int]:
        part = hr.shard_info()
        for number in itertools.count(part.rank, part.world):
            yield number


class Resumed(Numbers):
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

    class Asking(Numbers):
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
    with hr.DataLoader(Asking(), batch_size=4, collate_fn=list, ranks=hr.Ranks.none) as loader:
        assert list(loader) == [[0]]
    assert seen == [
        *(hr.ShardInfo(0, 1, epoch, 5) for epoch in range(2)),
        *(hr.ShardInfo(rank, 2, 3, 6) for rank in range(2)),
        hr.ShardInfo(0, 1, 0, 0),
    ]
    with pytest.raises(hr.OptionError, match="there is no epoch"):
        hr.shard_info()


def plain() -> Iterator[int]:
    part = hr.shard_info()
    return iter(range(part.rank, 10**6, part.world))


class Plain:
    def __iter__(self) -> Iterator[int]:
        return plain()


DIVIDED: dict[str, Callable[[], Any]] = {
    "asynchronous": Numbers,
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


class Silent(Numbers):
    ranks_by = None


class Lying(Numbers):
    async def aiter(self) -> AsyncIterator[int]:
        for number in range(8):
            yield number


class Wrong(Numbers):
    ranks_by = "worker"  # type: ignore[assignment]


UNSAID = r"(Silent|FromIterable).*hr\.shard_info\(\).*position.*hr\.Ranks\.none"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Silent().epoch(samples=8), UNSAID),
    (lambda: hr.from_iterable([1, 2]).epoch(samples=2), UNSAID),
    (Silent, UNSAID),
    (lambda: Silent().filter(bool), UNSAID),
    (lambda: Lying().epoch(samples=8), r"Lying .*without asking hr\.shard_info\(\)"),
    (lambda: Wrong().epoch(samples=8), "ranks_by='worker'"),
    (lambda: hr.from_iterable(5), "or a function that returns one"),  # type: ignore[arg-type]
    (Numbers, r"epoch\(samples=N\)"),
    (lambda: Numbers().take(8), r"epoch\(samples=N\)"),
    (lambda: Numbers().epoch(samples=8).filter(is_some), r"epoch\(samples=N\)"),
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_ranks_refuse_an_iterable_of_unknown_division(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        ranks(make(), 2)


def test_iterables_that_do_not_divide_their_samples_serve_one_rank_or_all() -> None:
    with hr.DataLoader(Silent().take(8), batch_size=4, collate_fn=list, ranks=hr.Ranks.none) as loader:
        assert flat(list(loader)) == list(range(8))
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
    class OfTheCaller(Numbers):
        loop = "caller"

        async def aiter(self) -> AsyncIterator[int]:
            assert threading.current_thread() is threading.main_thread()
            async for number in super().aiter():
                yield number

    async def read(rank: int) -> list[int]:
        async with loader_of(OfTheCaller().epoch(samples=8), rank, 2) as loader:
            return flat([batch async for batch in loader])

    assert [asyncio.run(read(rank)) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
