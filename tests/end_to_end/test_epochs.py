"""Numbers of epochs, skipped batches, and epochs without end."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders.loops import flat, lists, loaded, state_after
from builders.numbers import Numbers, is_even
from builders.tars import number_of, put_shards
from drop_in.acting import Made
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, random_split

import headrace as hr


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
@pytest.mark.parametrize("errors", [None, hr.Skip()])
@pytest.mark.parametrize("which", ENDLESS)
def test_epoch_without_end_is_an_error_when_a_filter_keeps_nothing(which: str, errors: hr.Skip | None) -> None:
    count, make = ENDLESS[which]
    with hr.DataLoader(make(), batch_size=8, errors=errors, timeout=30) as loader:
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


class Ten(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


TORCHS: list[tuple[Any, dict[str, Any]]] = [
    (Made(int), {}),
    (Made(int), {"shuffle": True}),
    (Made(int), {"batch_size": None}),
    (Made(int), {"sampler": [3, 1, 4]}),
    (Made(int), {"batch_sampler": BatchSampler(RandomSampler(range(20)), 3, drop_last=False)}),
    (Ten(), {}),
    (list(range(9)), {}),
    (Made(int), {"num_workers": 1, "economic": True}),
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
