"""Iterators outlive event loops and cancellations. Numbers of epochs, skipped batches, and epochs without end."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from builders.loops import flat, lists, loaded, rest_of, state_after
from builders.numbers import Made, Numbers, is_even
from builders.tars import number_of, put_shards
from drop_in import acting
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, random_split

import headrace as hr

COUNT = 20
LIST = list(range(COUNT))


class Counting(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(COUNT))


LOADERS: dict[str, Callable[[], hr.DataLoader[Any]]] = {
    "no workers": lambda: hr.DataLoader(LIST, 4),
    "iterable, no workers": lambda: hr.DataLoader(Counting(), 4),
    "workers": lambda: hr.DataLoader(LIST, 4, num_workers=2),
    "threads": lambda: hr.DataLoader(LIST, 4, num_workers=2, workers="thread"),
    "economic": lambda: hr.DataLoader(LIST, 4, num_workers=2, economic=True),
    "asynchronous data set": lambda: hr.DataLoader(Numbers(COUNT), 4),
    "stream": lambda: hr.DataLoader(Numbers(COUNT).filter(lambda number: number >= 0), 4),
}
pytestmark = pytest.mark.usefixtures("warm_server")
every_kind = pytest.mark.parametrize("kind", LOADERS)
leaves_threads = pytest.mark.may_leave(
    threads="^(Trio|AnyIO) .*thread", reason="libraries keep idle threads for a while"
)


async def take(batches: Any, count: int | None = None) -> list[int]:
    """The numbers of the next batches; None: of all that are left."""
    got: list[int] = []
    if count != 0:
        async for batch in batches:
            got += batch.tolist()
            if count is not None and len(got) >= 4 * count:
                break
    return got


@pytest.mark.slow
@leaves_threads
@pytest.mark.parametrize("order", [("asyncio", "asyncio"), ("asyncio", "trio"), ("trio", "asyncio"), ("trio", "trio")])
@every_kind
def test_another_event_loop_continues_an_iterator_when_the_first_has_ended(kind: str, order: tuple[str, str]) -> None:
    with LOADERS[kind]() as loader:
        batches = aiter(loader)
        first = anyio.run(take, batches, 2, backend=order[0])
        assert first == list(range(8))
        assert first + anyio.run(take, batches, backend=order[1]) == list(range(COUNT))
        assert anyio.run(take, batches, backend=order[1]) == [], "it is over"


@pytest.mark.slow
@every_kind
def test_another_event_loop_continues_an_iterator_while_a_task_of_the_first_waits(kind: str) -> None:
    """As where a loop is stopped and left, and nobody cancels its tasks."""

    async def begin() -> asyncio.Task[Any]:
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        return waiting

    with LOADERS[kind]() as loader:
        batches = aiter(loader)
        left = asyncio.new_event_loop()
        waiting = left.run_until_complete(begin())
        got = waiting.result().tolist() if waiting.done() else []
        got += asyncio.run(take(batches))
        waiting.cancel()
        left.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
        left.run_until_complete(left.shutdown_default_executor())
        left.close()
        assert got == list(range(COUNT))


class Gate:
    """Blocks the maker of number 4 until the gate is opened."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def pass_by(self, number: int) -> bool:
        if number == 4:
            self.is_reached.set()
            return self.is_open.is_set()
        return True


class Gated(Dataset[int]):
    """Numbers for the torch regime. A gate holds one of them."""

    def __init__(self, gate: Gate, fails: bool) -> None:
        self.gate, self.fails = gate, fails

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if not self.gate.pass_by(index):
            self.gate.is_open.wait()
        if self.fails and index == 4:
            raise ValueError("number 4")
        return index


def gated(gate: Gate, fails: bool) -> Made:
    async def get(key: int) -> int:
        if not gate.pass_by(key):
            await asyncio.to_thread(gate.is_open.wait)
        if fails and key == 4:
            raise ValueError("number 4")
        return key

    return Made(get, COUNT)


async def cancel_waiting(batches: Any, gate: Gate) -> None:
    """Cancel a task that waits for the gate, and open the gate."""
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.to_thread(gate.is_reached.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.is_open.set()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dataset", [Gated, gated])
def test_batch_or_its_error_is_next_after_the_task_that_waited_for_it_was_cancelled(dataset: Any, fails: bool) -> None:
    gate = Gate()
    states: list[Any] = []

    async def main() -> list[int]:
        async with hr.DataLoader(dataset(gate, fails), 4) as loader:
            batches = aiter(loader)
            got = await take(batches, 1)
            await cancel_waiting(batches, gate)
            states.append(loader.state_dict())
            if fails:
                with pytest.raises(ValueError, match="number 4"):
                    await anext(batches)
            return got + await take(batches)

    assert asyncio.run(main()) == [*range(4), *range(8 if fails else 4, COUNT)]
    if not fails:
        assert flat(lists(rest_of(hr.DataLoader(dataset(gate, False), 4), states[0]))) == list(range(4, COUNT))


@leaves_threads
def test_waiting_for_a_batch_can_be_cancelled_under_trio_and_nothing_is_lost() -> None:
    async def read() -> list[int]:
        batches = aiter(hr.DataLoader(LIST, 10, num_workers=1))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(batches)
        return await take(batches)

    assert anyio.run(read, backend="trio") == list(range(COUNT))


def test_iterator_in_a_thread_has_a_state_and_can_be_closed() -> None:
    async def main() -> None:
        loader = hr.DataLoader(LIST, 4)
        batches: Any = aiter(loader)
        with pytest.raises(hr.OptionError, match="ask its loader"):
            batches.state_dict()
        await take(batches, 2)
        assert batches.state_dict() == loader.state_dict()
        await batches.aclose()
        with pytest.raises(hr.errors.LoaderClosedError):
            await anext(batches)

    asyncio.run(main())


class OfTheCaller(hr.AsyncIterableDataset):
    """Numbers of the program's own loop, which wait there for an event."""

    loop = "caller"

    def __init__(self) -> None:
        self.is_reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def aiter(self) -> Any:
        for number in range(COUNT):
            if number == 8:
                self.is_reached.set()
                await self.go_on.wait()
            yield number


def close_at_once(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop as nobody should: without cancelling what runs there."""
    loop.run_until_complete(loop.shutdown_default_executor())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what is tried here
    loop.close()


@pytest.mark.parametrize("ending", ["cancelled", "closed", "closed while it makes a sample"])
def test_samples_of_the_callers_loop_are_an_error_after_its_end(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are neither waited for without end, nor is their end taken for that of the epoch."""
    data = OfTheCaller()
    with hr.DataLoader(data, batch_size=4) as loader:

        async def begin() -> Any:
            batches = aiter(loader)
            assert await take(batches, 1) == list(range(4))
            return batches

        if ending == "cancelled":
            batches = asyncio.run(begin())
        else:
            loop = asyncio.new_event_loop()
            batches = loop.run_until_complete(begin())
            if ending != "closed":
                loop.run_until_complete(data.is_reached.wait())
            close_at_once(loop)
        with pytest.raises(hr.errors.LoaderClosedError, match=r"OfTheCaller\.loop is 'caller'"):
            asyncio.run(take(batches))
    assert not caplog.records


def test_comparison_of_ranks_is_awaited_by_the_next_task_when_the_first_was_cancelled() -> None:
    """Ranks compare their plans there, in a thread: the loop does not wait, and no batch precedes the comparison."""
    gate = Gate()

    def compare() -> None:
        gate.is_reached.set()
        gate.is_open.wait()
        raise hr.StateMismatchError("plans differ")

    async def main() -> None:
        async with hr.DataLoader(Numbers(COUNT), 4) as loader:
            batches: Any = aiter(loader)
            batches.before = compare
            await cancel_waiting(batches, gate)
            with pytest.raises(hr.StateMismatchError, match="plans differ"):
                await anext(batches)

    asyncio.run(main())


@pytest.mark.parametrize("teller", ["loader", "data set", "sampler"])
def test_an_epoch_is_the_same_whoever_tells_its_number(teller: str) -> None:
    data = Numbers().shuffle()
    with hr.DataLoader(data, batch_size=8) as loader, hr.DataLoader(data, batch_size=8) as other:
        epochs = [lists(other) for _ in range(4)]
        told: Any = {"loader": loader, "data set": data, "sampler": loader.sampler}[teller]
        told.set_epoch(3)
        assert loader.epoch == 3
        assert lists(loader) == epochs[3]
        assert loader.epoch == 4
        told.set_epoch(1)
        assert lists(loader) == epochs[1]
        assert lists(loader) == epochs[2]


def test_skipped_batches_are_not_read() -> None:
    numbers = Numbers()
    with hr.DataLoader(numbers, batch_size=8) as loader:
        loader.skip(2)
        loader.skip(1)
        assert lists(loader) == [[*range(24, 32)], [*range(32, 40)]]
        assert min(numbers.asked) == 24
        assert lists(loader)[0] == [*range(8)]
        loader.skip(100)
        assert lists(loader) == []
        assert loader.epoch == 3


def test_positions_tell_how_far_a_trainer_is() -> None:
    with hr.DataLoader(Numbers(), batch_size=8, ranks=hr.Ranks(rank=1, world_size=2)) as loader:
        assert loader.position == (0, 0, 0)
        batches = iter(loader)
        next(batches)
        next(batches)
        assert loader.position == (2, 16, 32)
        state = batches.state_dict()
        assert next(batches).tolist() == [36, 37, 38, 39]
        assert loader.position == (3, 20, 40)
        assert next(batches, None) is None
        assert loader.position == (0, 0, 0)
    with hr.DataLoader(Numbers(), batch_size=8, ranks=hr.Ranks(rank=1, world_size=2)) as loader:
        loader.load_state_dict(state)
        assert loader.position == (2, 16, 32)


class Failing(Numbers):
    async def aget(self, key: int) -> int:
        if key == 3:
            raise ValueError("bad")
        return key


def test_error_of_peek_is_raised_again_in_its_place_and_that_of_skipped_batches_is_not() -> None:
    with hr.DataLoader(Failing(), batch_size=4) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="bad"):
                loader.peek()
        batches = iter(loader)
        assert loader.position.batch == 0
        with pytest.raises(ValueError, match="bad"):
            next(batches)
        assert next(batches).tolist() == [4, 5, 6, 7]
        assert loader.position.batch == 2
    with hr.DataLoader(Failing().filter(lambda number: number == 3 or number % 2 == 0), batch_size=2) as loader:
        loader.skip(2)
        assert next(iter(loader)).tolist() == [6, 8]


def test_two_iterators_of_one_loader_have_ends_of_their_own() -> None:
    data = Numbers().filter(is_even).take(12)
    state = state_after(hr.DataLoader(data, batch_size=4), 1)
    with hr.DataLoader(data, batch_size=4) as loader:
        loader.load_state_dict(state)
        first = iter(loader)
        second = iter(loader)
        assert [len(lists(first)), len(lists(second))] == [2, 3]


def test_loop_that_stops_early_is_followed_by_another_order() -> None:
    def first_two(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in itertools.islice(loader, 2)]

    with hr.DataLoader(hr.from_map(range(64)).shuffle(), batch_size=8, seed=1) as loader:
        epochs = [lists(loader) for _ in range(3)]
    with hr.DataLoader(hr.from_map(range(64)).shuffle(), batch_size=8, seed=1) as loader:
        assert (first_two(loader), loader.epoch) == (epochs[0][:2], 0)
        state = loader.state_dict()
        iter(loader)  # nothing was taken of it
        assert loader.peek().tolist() == epochs[1][0]
        assert (first_two(loader), loader.epoch) == (epochs[1][:2], 1)
        loader.load_state_dict(state)
        assert lists(loader) == epochs[0][2:]
        assert first_two(loader) == epochs[1][:2]
        for _ in range(2):
            loader.set_epoch(1)
            assert first_two(loader) == epochs[1][:2]
        assert first_two(loader) == epochs[1][:2]
        assert [lists(loader) for _ in range(2)] == epochs[1:]


def is_none(number: int) -> bool:
    return number < 0


async def is_none_later(number: int) -> bool:
    return number < 0


class First:
    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, number: int) -> bool:
        is_new = number not in self.seen
        self.seen.add(number)
        return is_new


def mixture() -> Any:
    return hr.mix({"rare": Numbers(), "often": Numbers()}, {"rare": 1, "often": 9}, until="forever", step=8)


def shards(name: str) -> Any:
    return hr.stream(put_shards(name, [1500, 2500], 1), index=None).map(number_of)


ENDLESS: dict[str, tuple[int, Callable[[], Any]]] = {
    "epoch": (40, lambda: Numbers().filter(is_none).epoch(samples=60)),
    "shuffled epoch": (40, lambda: Numbers().shuffle().filter(is_none).epoch(samples=60)),
    "repeat": (40, lambda: Numbers().filter(is_none).repeat()),
    "asynchronous": (40, lambda: Numbers().filter(is_none_later).epoch(samples=60)),
    "first pass alone": (40, lambda: Numbers().filter(First()).epoch(samples=60)),
    "put together": (40, lambda: Numbers().filter(is_none).batch(4).unbatch().epoch(samples=12)),
    "mixture, epoch": (400, lambda: mixture().filter(is_none).epoch(samples=60)),
    "mixture, take": (400, lambda: mixture().filter(is_none).take(60)),
    "mixture": (400, lambda: mixture().filter(is_none)),
    "shards, epoch": (4000, lambda: shards("filtered out").filter(is_none).epoch(samples=60)),
    "shards, take": (4000, lambda: shards("filtered out").filter(is_none).repeat().take(60)),
    "shards": (4000, lambda: shards("filtered out").filter(is_none).repeat()),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", ENDLESS)
def test_epoch_without_end_is_an_error_when_a_filter_keeps_nothing(which: str) -> None:
    count, make = ENDLESS[which]
    with hr.DataLoader(make(), batch_size=8, errors=hr.Skip(), timeout=30) as loader:
        batches = iter(loader)
        got = [next(batches).tolist() for _ in range(5 if which == "first pass alone" else 0)]
        assert [number for batch in got for number in batch] == list(range(40 if got else 0))
        with pytest.raises(hr.OptionError, match=f"only {count} to begin again with"):
            next(batches)
        assert next(batches, None) is None


@pytest.mark.slow
def test_filter_may_keep_few_samples_of_an_endless_epoch() -> None:
    """One of 15,000 samples of the mixture is kept, and both sources together have a tenth of so many."""
    mixed = hr.mix({"rare": Numbers(1500), "often": Numbers()}, {"rare": 1, "often": 9}, until="forever")
    data = mixed.filter(lambda number: number == 1499).take(1)
    assert lists(loaded(data, batch_size=1, timeout=60)) == [[1499]]
    data = Numbers().filter(lambda number: hr.rng().random() < 0.02).epoch(samples=30)
    assert len(flat(loaded(data, batch_size=8, timeout=30))) == 30
    data = shards("filtered out too").filter(is_none).repeat(4).take(60)  # has an end
    assert loaded(data, batch_size=8, timeout=30) == []


@pytest.mark.parametrize("is_counted", [True, False])
def test_epoch_advances_with_its_last_batch_or_the_end_of_an_epoch_of_unknown_length(is_counted: bool) -> None:
    data = hr.from_map(range(10))
    with hr.DataLoader(data if is_counted else data.filter(lambda key: key >= 0), batch_size=4) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        assert loader.epoch == 0
        next(batches)
        assert loader.epoch == is_counted
        if is_counted:
            loader.set_epoch(0)
        assert list(batches) == []
        assert loader.epoch == (not is_counted), "it was counted twice"


TORCHS: list[tuple[Any, dict[str, Any]]] = [
    (acting.Made(int), {}),
    (acting.Made(int), {"shuffle": True}),
    (acting.Made(int), {"batch_size": None}),
    (acting.Made(int), {"sampler": [3, 1, 4]}),
    (acting.Made(int), {"batch_sampler": BatchSampler(RandomSampler(range(20)), 3, drop_last=False)}),
    (Counting(), {}),
    (list(range(9)), {}),
    (acting.Made(int), {"num_workers": 1, "economic": True}),
]


@pytest.mark.parametrize(("data", "options"), TORCHS)
@pytest.mark.usefixtures("warm_server")
def test_epoch_of_data_sets_of_torch_can_be_set(data: Any, options: dict[str, Any]) -> None:
    with hr.DataLoader(data, **options) as loader:
        assert loader.regime == "torch"
        loader.set_epoch(3)
        assert loader.epoch == 3
        assert len(list(loader)) > 0
        with pytest.raises(hr.OptionError, match="consumed"):
            loader.peek()


def test_parts_of_a_data_set_of_ours_are_torchs_data_sets() -> None:
    assert hr.DataLoader(Numbers()).regime == "headrace"
    first, second = random_split(Numbers(6), [4, 2], torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    got = [int(n) for part in (first, second) for batch in hr.DataLoader(part, batch_size=2) for n in batch]
    assert sorted(got) == list(range(6))
