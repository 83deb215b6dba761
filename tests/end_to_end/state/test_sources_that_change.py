"""Data sets with states of their own, and shards that changed after a state was saved."""

import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders.loops import flat, lists, rest_of, resumed_anywhere, saved
from builders.numbers import Counting, is_odd
from builders.tars import number_of, numbered_samples, tar
from end_to_end.state import sources
from end_to_end.state.runs import QUICK
from end_to_end.state.sources import Seen, Written, rows
from process.waiting import wait_until

import headrace as hr


class Grows(sources.Stateful):
    async def aiter(self) -> AsyncIterator[dict[str, Any]]:
        self.total += not self.is_told
        async for sample in super().aiter():
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        super().load_state_dict(state)


class CountsEpochs(hr.AsyncIterableDataset):
    """Numbers with their epoch. The data set knows the epoch, its iterator the position, which its end resets."""

    def __init__(self, total: int) -> None:
        self.total, self.epoch = total, 0

    def aiter(self) -> Any:
        return _OfEpoch(self)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class _OfEpoch(AsyncIterator[dict[str, int]]):
    def __init__(self, dataset: CountsEpochs) -> None:
        self.dataset, self.next = dataset, 0

    async def __anext__(self) -> dict[str, int]:
        if self.next == self.dataset.total:
            self.next, self.dataset.epoch = 0, self.dataset.epoch + 1
            raise StopAsyncIteration
        self.next += 1
        return {"n": 1000 * self.dataset.epoch + self.next - 1, "crc": 0}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def _resetting(total: int) -> Any:
    return Counting(total, sources.sample_of).map(Seen())


SEVEN = Written([7])
STATEFUL: dict[str, Callable[[], Any]] = {
    "starts again": lambda: sources.Stateful(SEVEN).map(Seen()),
    "starts again, filtered": lambda: sources.Stateful(Written([30])).map(Seen()).filter(sources.some),
    "continues": lambda: Counting(make=sources.sample_of).map(Seen()).epoch(samples=6),
    "continues, taken": lambda: Counting(make=sources.sample_of).map(Seen()).take(7),
    "grows": lambda: Grows(SEVEN).map(Seen()),
    "function of all samples": lambda: sources.applied(sources.Keyed(SEVEN).map(Seen())),
    "stateful iterator": lambda: sources.WithStatefulIterator(7).map(Seen()),
    **{f"resets after {total}": partial(_resetting, total) for total in (12, 10, 3)},
    **{f"counts epochs of {total}": partial(CountsEpochs, total) for total in (12, 10, 3)},
    **{f"{taken} of 10 taken": partial(lambda taken: CountsEpochs(10).take(taken), taken) for taken in (8, 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"batch_size": 2}, {"batch_size": 3}, {"batch_size": 4, "prefetch_factor": 0}], ids=str
)
@pytest.mark.parametrize("which", STATEFUL)
def test_data_set_with_a_state_resumes_after_any_batch(which: str, options: dict[str, Any]) -> None:
    resumed_anywhere(lambda: hr.DataLoader(STATEFUL[which](), timeout=30, fetch=QUICK, **options), rows, epochs=3)


def test_padding_has_the_positions_and_random_numbers_of_the_begin_also_after_a_resume() -> None:
    options: dict[str, Any] = {"batch_size": 4, "ranks": hr.Ranks(last_batch="pad"), "fetch": QUICK}
    data = sources.Keyed(Written([10])).shuffle().map(Seen())
    for whole in resumed_anywhere(lambda: hr.DataLoader(data, **options), rows, epochs=2):
        samples = flat(whole)
        assert len(samples) == 12
        assert len(set(samples)) == 10


State = dict[str, Any]


class Shards:
    """Three archives of 30 samples. Tests truncate one."""

    def __init__(self, folder: Path) -> None:
        self.urls = [str(folder / f"{k}.tar") for k in range(3)]
        self._whole = [tar(numbered_samples(30 * k, 30, 40)) for k in range(3)]
        for url, archive in zip(self.urls, self._whole, strict=True):
            Path(url).write_bytes(archive)

    def cut_off(self, is_so: bool, shard: int = 0) -> None:
        whole = self._whole[shard]
        cut = whole[: whole.index(b"%06d.bin\0" % (30 * shard + 10)) + 100]
        Path(self.urls[shard]).write_bytes(cut if is_so else whole)

    def loader(self, seed: int, window: int = 40, **options: Any) -> hr.DataLoader[Any]:
        data = hr.stream(self.urls, index=None).shuffle(window=window).map(number_of)
        options = {"batch_size": 4, "errors": hr.Skip(), **options}
        return hr.DataLoader(data, seed=seed, timeout=30, fetch=QUICK, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_cut_off", [(True, True), (True, False), (False, True)])
def test_state_is_refused_or_exact_after_a_shard_changed(tmp_path: Path, is_cut_off: Any, seed: int) -> None:
    """Where a shard ends too soon, so does the window of the shuffle: places in that are those of other samples."""
    shards, before, after = Shards(tmp_path), *is_cut_off
    shards.cut_off(before)
    received, states = list[int](), list[tuple[list[int], State]]()
    with shards.loader(seed) as loader:
        for batch in loader:
            received += batch.tolist()
            states.append((list(received), saved(loader)))
    shards.cut_off(after)
    refused = []
    for had, state in states:
        try:
            came = flat(lists(rest_of(shards.loader(seed), state)))
        except hr.StateMismatchError as error:
            refused.append(error.field)
            continue
        got = sorted(had + came)
        assert len(got) == len(set(got))
        assert set(range(30, 90)) <= set(got)
        if before == after:
            assert had + came == received
    assert set(refused) == (set() if before == after else {"source_state"})


class Held:
    """Keeps its worker busy with one sample until released. Later batches come first."""

    def __init__(self, number: int) -> None:
        self.number, self.may_go_on = number, threading.Event()

    def __call__(self, sample: dict[str, Any]) -> int:
        number = number_of(sample)
        if number == self.number:
            assert self.may_go_on.wait(30)
        return number


@pytest.mark.slow
@pytest.mark.parametrize("is_cut_off", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("held", [0, 4])
def test_unordered_state_is_refused_or_exact_after_a_shard_changed(tmp_path: Path, is_cut_off: Any, held: int) -> None:
    shards, before, after = Shards(tmp_path), *is_cut_off
    data = hr.stream(shards.urls, index=None)
    options: dict[str, Any] = {"batch_size": 4, "errors": hr.Skip(), "in_order": False, "timeout": 30, "fetch": QUICK}
    shards.cut_off(before)
    hold, received, states = Held(held), list[int](), list[tuple[list[int], State]]()
    with hr.DataLoader(data.map(hold), num_workers=2, workers="thread", prefetch_factor=4, **options) as loader:
        batches = iter(loader)
        for _ in range(5):
            received += next(batches).tolist()
            states.append((list(received), saved(loader)))
        hold.may_go_on.set()
    assert held not in received
    shards.cut_off(after)
    refused = []
    for had, state in states:
        try:
            got = sorted(had + flat(lists(rest_of(hr.DataLoader(data.map(number_of), **options), state))))
        except hr.StateMismatchError as error:
            refused.append(error.field)
            continue
        there = range(90) if not (before or after) else [*range(9), *range(30, 90)]
        assert len(got) == len(set(got))
        assert set(there) <= set(got)
    assert set(refused) == (set() if before == after else {"source_state"})


def stopped_in_a_shard(shards: Shards, batches: int, window: int = 7) -> tuple[int, list[int], State]:
    """(the shard that is read first, what came of it in batches of one, the state)."""
    with shards.loader(0, window, batch_size=1) as loader:
        had = [int(batch) for _, batch in zip(range(batches), loader, strict=False)]
        state = saved(loader)
    assert {number // 30 for number in had} == {had[0] // 30}
    return had[0] // 30, had, state


def test_state_of_a_window_is_refused_when_its_shard_is_truncated_before_the_used_samples(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shard, _, state = stopped_in_a_shard(shards, 18)
    shards.cut_off(True, shard)
    with pytest.raises(hr.StateMismatchError) as caught:
        rest_of(shards.loader(0, 7, batch_size=1), state)
    assert caught.value.field == "source_state"
    with pytest.raises(hr.errors.FormatError, match="is truncated"):
        rest_of(shards.loader(0, 7, batch_size=1, errors=None), state)
    shards.cut_off(False, shard)
    assert len(rest_of(shards.loader(0, 7, batch_size=1), state)) == 90 - 18


@pytest.mark.parametrize("batches", [11, 14])
def test_truncation_before_the_used_samples_of_a_shard_is_an_error(tmp_path: Path, batches: int) -> None:
    window = 1  # the mark is right before the next sample
    shards = Shards(tmp_path)
    shard, had, state = stopped_in_a_shard(shards, batches, window)
    shards.cut_off(True, shard)
    with pytest.raises(hr.errors.FormatError, match="is truncated"):
        rest_of(shards.loader(0, window, batch_size=1, errors=None), state)
    loader = shards.loader(0, window, batch_size=1)
    others = {number for number in range(90) if number // 30 != shard}
    assert set(flat(lists(rest_of(loader, state)))) == others
    assert loader.stats().skipped == 1
    assert len(had) == batches


class Lines(sources.Stateful):
    """Numbers, for `for` and for `async for`."""

    def __init__(self, total: Any = 20) -> None:
        self.total, self.next, self.is_told = total, 0, False

    async def aiter(self) -> AsyncIterator[Any]:
        for number in self:
            yield number

    def __iter__(self) -> Iterator[int]:
        self.next, self.is_told = self.next if self.is_told else 0, False
        while self.next < self.total:
            self.next += 1
            yield self.next - 1


LATER: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "batch": lambda data: data.batch(4).unbatch(),
    "flat_map": lambda data: data.flat_map(lambda n: [n] * 6),
    "take, flat_map": lambda data: data.take(10).flat_map(lambda n: [n] * 3).take(20),
    "shuffle": lambda data: data.shuffle(window=8),
    "filter": lambda data: data.filter(lambda n: n > 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("operators", LATER)
@pytest.mark.parametrize("make", [lambda: Lines()._as_stream(), lambda: hr.from_iterable(Lines())])
def test_later_epochs_of_a_data_set_resume_also_before_its_first_sample_is_used(
    make: Callable[[], hr.Stream], operators: str
) -> None:
    resumed_anywhere(lambda: hr.DataLoader(LATER[operators](make()), 2), epochs=3, most=40)


LIMITED: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "epoch": lambda data: data.epoch(samples=10),
    "filter, epoch": lambda data: data.filter(is_odd).epoch(samples=10),
    "filter, take": lambda data: data.filter(is_odd).take(10),
    "batch, take": lambda data: data.batch(2).unbatch().take(10),
}


@pytest.mark.parametrize("operators", LIMITED)
def test_state_after_an_epoch_of_an_endless_data_set_reads_no_more_of_it(operators: str) -> None:
    (first, *_) = resumed_anywhere(
        lambda: hr.DataLoader(LIMITED[operators](Lines(math.inf)._as_stream()), 5, timeout=20), epochs=2
    )
    assert len(first) == 2


class Blocked(Lines):
    """Waits before a sample until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.is_released = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 12:
                self.waits.set()
                self.is_released.wait()
            yield number


def test_state_is_loaded_into_a_data_set_after_the_end_of_its_last_iterator() -> None:
    data = Blocked()
    with hr.DataLoader(hr.from_iterable(data), 2) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        state = loader.state_dict()
        assert data.waits.wait(20)
        batches.close()
        loader.load_state_dict(state)
        threading.Timer(0.2, data.is_released.set).start()  # before that, its thread may still move the position
        assert [n for batch in loader for n in batch.tolist()] == list(range(6, 20))


def test_consumer_that_waits_for_the_end_of_another_iterator_learns_that_the_loader_was_closed() -> None:
    data, learned = Blocked(), list[str]()
    loader = hr.DataLoader(hr.from_iterable(data), 2)

    def consume() -> None:
        with pytest.raises(hr.errors.LoaderClosedError):
            next(iter(loader))
        learned.append("closed")

    batches = iter(loader)
    next(batches)
    assert data.waits.wait(20)
    batches.close()
    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_until(lambda: len(loader._behind._iterators) > 1 or not consumer.is_alive(), "another iterator")
    loader.close()
    consumer.join(20)
    data.is_released.set()
    assert learned == ["closed"]
