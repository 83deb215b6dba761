"""Batches of samples that are slow to come, and samples that are delivered one by one."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from builders.loops import flat, lists, loaded, rest_of, state_after
from builders.numbers import Counting, Made, Numbers, is_kept_later, streamed
from builders.tars import put_shards
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace._util.shared_memory import PublishedPlaces
from headrace.torch_compat.serialize import PackedEach, is_simple, unpack_each

LONG_S = 3600.0  # a test that waited for it would not end


def first_ten() -> hr.AsyncIterableDataset:
    return streamed(range(10), "position")


class Messages(hr.AsyncIterableDataset):
    """Endless numbers that the test sends."""

    ranks_by = "shard_info"

    def __init__(self) -> None:
        self.next = 0
        self._may, self._more = 0, threading.Condition()

    def send(self, count: int) -> None:
        with self._more:
            self._may += count
            self._more.notify_all()

    async def aiter(self) -> AsyncIterator[int]:
        while True:
            while self.next >= self._may:
                await asyncio.to_thread(self._wait)
            self.next += 1
            yield self.next - 1

    def _wait(self) -> None:
        with self._more:
            self._more.wait_for(lambda: self.next < self._may, timeout=0.1)  # a loader may be closed meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_batch_is_emitted_without_samples_that_do_not_arrive(workers: int) -> None:
    messages = Messages()
    with hr.DataLoader(messages.map(abs).batch(4, max_wait_s=0.02), num_workers=workers, timeout=60) as loader:
        batches, came = iter(loader), list[int]()
        for count in (1, 3, 9, 2):
            messages.send(count)
            wanted = len(came) + count
            while len(came) < wanted:
                batch = next(batches)
                assert 1 <= len(batch) <= 4
                came += batch.tolist()
        assert came == list(range(15))


@pytest.mark.parametrize("has_shards", [False, True])
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "thread"), (1, "process")])
def test_finished_batches_do_not_wait_for_a_function_that_waits_for_the_trainer(
    workers: int, kind: Literal["process", "thread"], has_shards: bool, tmp_path: Path
) -> None:
    waits_at, after = (412, 772), dict[int, dict[str, object]]()  # the first samples of batches

    def waits(sample: Any) -> int:
        number: int = sample["n"] if has_shards else sample
        late_s = time.monotonic() + 60
        while number in waits_at and not (tmp_path / str(number)).exists():
            assert time.monotonic() < late_s
            time.sleep(0.01)
        return number

    data = hr.from_map(range(1000))
    if has_shards:  # batches go across their ends
        for k in range(0, 1000, 10):
            (tmp_path / f"{k:03}.jsonl").write_text("".join(f'{{"n": {k + i}}}\n' for i in range(10)))
        data = hr.stream(sorted(map(str, tmp_path.glob("*.jsonl"))))
    stream = data.map(waits)
    with hr.DataLoader(stream, batch_size=4, num_workers=workers, workers=kind, timeout=90) as loader:
        came = list[int]()
        for batch in loader:
            came += batch.tolist()
            for number in waits_at:
                if number == len(came):
                    (tmp_path / str(number)).touch()
                    after[len(came)] = loader.state_dict()
        assert came == list(range(1000))
    for count, state in after.items():
        with hr.DataLoader(stream, batch_size=4) as resumed:
            resumed.load_state_dict(state)
            assert flat(lists(resumed)) == list(range(count, 1000))


def test_batch_is_emitted_without_slow_samples_of_a_map() -> None:
    may_go = threading.Event()

    async def slow(key: int) -> int:
        while key >= 3 and not may_go.is_set():
            await asyncio.to_thread(may_go.wait, 0.1)
        return key

    with hr.DataLoader(Made(slow).batch(8, max_wait_s=0.02), timeout=60) as loader:
        batches, came = iter(loader), list[int]()
        while len(came) < 3:
            came += next(batches).tolist()
        may_go.set()
        assert came + flat(lists(batches)) == list(range(8))


def test_ranks_make_as_many_steps_of_batches_of_any_size() -> None:
    """All that ranks that train together need: none may wait for a step that the others do not make."""
    came = []
    for rank in range(2):
        stream = first_ten().batch(2, max_wait_s=LONG_S).epoch(samples=4)
        with hr.DataLoader(stream, ranks=hr.Ranks(rank=rank, world_size=2), timeout=60) as loader:
            batches = lists(loader)
            assert len(batches) == 2
            came += flat(batches)
    assert sorted(came) == list(range(8))
    with pytest.raises(hr.OptionError, match="come to their end on rank 0 of 2 after 3 of 4 batches"):
        loaded(first_ten().batch(2, max_wait_s=LONG_S).epoch(samples=8), ranks=hr.Ranks(rank=0, world_size=2))
    with pytest.raises(hr.OptionError, match=r"last_batch='uneven'.*\.epoch\(samples=N\)"):
        loaded(first_ten().batch(2, max_wait_s=1), ranks=hr.Ranks(rank=0, world_size=2))


def batches_of(stream: hr.Stream, ranks: int, steps: int | None, state: Any) -> tuple[list[list[int]], Any]:
    """(what ranks get in so many steps or all, one state of all of them)."""
    loaders = [
        hr.DataLoader(stream, ranks=hr.Ranks(rank=rank, world_size=ranks), batch_size=None, timeout=60)
        for rank in range(ranks)
    ]
    try:
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        came = [
            [sample.reshape(-1).tolist() for sample in itertools.islice(map(torch.as_tensor, loader), steps)]
            for loader in loaders
        ]
        return [*itertools.chain(*came)], json.loads(
            json.dumps(hr.merge_states([loader.state_dict() for loader in loaders]))
        )
    finally:
        for loader in loaders:
            loader.close()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("wait_s", [LONG_S, 1e-6, None])
def test_merged_states_resume_on_other_ranks(before: int, after: int, wait_s: float | None) -> None:
    """As of samples that are counted as they come and given one by one, for which nothing waits."""
    data = hr.from_map(range(72)).shuffle()
    if wait_s is None:
        stream = data.filter(lambda n: n < 60).epoch(samples=48)
    else:
        stream = data.batch(4, max_wait_s=wait_s).epoch(samples=12)
    first, state = batches_of(stream, before, 2, None)
    rest, _ = batches_of(stream, after, None, state)
    numbers = [n for batch in first + rest for n in batch]
    assert len(first) + len(rest) == (48 if wait_s is None else 12)
    assert len(numbers) == len(set(numbers))
    if wait_s == LONG_S:
        assert len(numbers) == 48


def test_failed_samples_are_skipped_and_no_batch_is_empty() -> None:
    def broken(n: int) -> int:
        if n < 5:
            raise ValueError(f"{n} is damaged")
        return n

    stream = first_ten().map(broken).batch(4, max_wait_s=LONG_S)
    assert stream.describe().splitlines()[-1] == "  .batch(4, max_wait_s=3600)  [workers]"
    with hr.DataLoader(stream, errors=hr.Skip()) as loader:
        assert [batch.tolist() for batch in loader] == [[5, 6, 7], [8, 9]]
        assert loader.stats().skipped == 5


NO_TIMES = (0, -1, float("nan"), float("inf"), "1", True, torch.ones(2))


def timed(max_wait_s: Any, _: Any = None) -> hr.Stream:
    return first_ten().batch(4, max_wait_s=max_wait_s)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda data: data.filter(len), r"\.filter\(len\) cannot follow \.batch\(4, max_wait_s=1\): .* time cuts"),
        (lambda data: data.unbatch(), r"\.unbatch\(\) cannot"),
        (lambda data: data.flat_map(list), r"\.flat_map\(list\) cannot"),
        (lambda data: data.map(list).batch(2), r"\.batch\(2\) cannot"),
        (lambda data: data.take(3).padded_batch(2), r"\.padded_batch\(2\) cannot"),
        (lambda data: data.bucket(len, [3], batch_size=2), r"\.bucket\(len, \[3\], batch_size=2\) cannot"),
        (lambda data: data.batch(2, max_wait_s=2), r"\.batch\(2, max_wait_s=2\) cannot"),
        (lambda data: data.collate(list).collate(list), "makes batches of lists"),
        (lambda data: hr.DataLoader(data, collate_fn=list), r"collate_fn=list and .*: put \.collate\(list\) right"),
        (lambda data: hr.DataLoader(data, batch_size=3), r"batch_size=3 and \.batch\(4, max_wait_s=1\) exclude"),
        (lambda data: hr.DataLoader(data, drop_last=True), r"drop_last=True and \.batch\(4, max_wait_s=1\)"),
        (lambda data: hr.DataLoader(data, in_order=False), r"in_order=False and \.batch\(4, max_wait_s=1\)"),
        (lambda _: first_ten().batch(4, drop_last=True, max_wait_s=2), "drop_last"),
        *((partial(timed, wait_s), "must be a number of seconds above 0") for wait_s in NO_TIMES),
    ],
)
def test_operators_whose_result_would_depend_on_time_are_refused(make: Callable[[hr.Stream], Any], match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make(timed(1))


COUNT = 150
KIB = 1024


class Answered(hr.AsyncIterableDataset):
    """Gives a sample only once the one before it was received."""

    async def aiter(self) -> Any:
        self.loop, self.received = asyncio.get_running_loop(), asyncio.Semaphore(1)
        for number in range(COUNT):
            await self.received.acquire()
            yield number


def fails_at_some(number: int) -> int:
    if number % 10 in (3, 4):
        raise ValueError(number)
    return number


def of_any_size(number: int) -> np.ndarray[Any, Any]:
    return np.full([10, 100 * KIB, 3, 300 * KIB][number % 4], number % 250, np.uint8)


def all_of(data: Any, **options: Any) -> list[Any]:
    return loaded(data, batch_size=None, **options)


def test_errors_come_in_their_places_and_cost_no_other_sample() -> None:
    got = list[Any]()
    with hr.DataLoader(Numbers(COUNT).map(fails_at_some), batch_size=None) as loader:
        samples = iter(loader)
        while len(got) < COUNT:
            try:
                got.append(int(next(samples)))
            except ValueError as error:
                got.append(error.args)
            assert loader.position.batch <= len(got)
        assert next(samples, None) is None
    assert got == [(n,) if n % 10 in (3, 4) else n for n in range(COUNT)]


def test_samples_of_any_size_are_whole_and_share_no_memory() -> None:
    with hr.DataLoader(Numbers(COUNT).map(of_any_size), batch_size=None, memory_budget="2MiB") as loader:
        kept = []
        for number, sample in enumerate(loader):
            assert sample.nbytes == sample.untyped_storage().nbytes()
            assert np.array_equal(sample.numpy(), of_any_size(number))
            kept += [(number, sample)] if number % 9 == 0 else []
    for number, sample in kept:
        assert np.array_equal(sample.numpy(), of_any_size(number))
    shared = [0]
    for sample in all_of(hr.from_map(range(20)).map(lambda _: {"shared": shared})):
        assert sample == {"shared": [0]}
        sample["shared"].append(1)


def test_sample_is_delivered_before_the_next_one_is_made() -> None:
    data = Answered()
    with hr.DataLoader(data, batch_size=None) as loader:
        for number, sample in enumerate(loader):
            assert sample == number
            data.loop.call_soon_threadsafe(data.received.release)


def test_no_more_samples_are_made_ahead_than_prefetch_factor() -> None:
    made = list[int]()
    with hr.DataLoader(hr.from_map(range(400)).map(made.append), batch_size=None, prefetch_factor=40) as loader:
        for number, _ in enumerate(loader, 1):
            assert len(made) <= number + 40
    assert len(made) == 400


@given(sizes=st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=40), room=st.integers(1, 20))
def test_published_values_can_be_read_before_the_others_are_made(sizes: list[list[int]], room: int) -> None:
    memory, packed, values = memoryview(bytearray(PublishedPlaces.NBYTES + room * 512)), PackedEach(), list[object]()
    reader, writer = PublishedPlaces(memory), PublishedPlaces(memory)
    writer.begin(1)
    for number, lengths in enumerate(sizes):
        values.append((number, [np.arange(length, dtype=np.uint8) for length in lengths]))
        packed.add(values[-1])
        if not packed.publish(memory, writer):
            del values[-1]
            assert packed.nbytes > room * 512 or sum(2 + 2 * len(each) for each in sizes) > 2045
            break
        assert repr([opened() for opened in unpack_each(bytes(memory), reader.read(reader.count(1)))]) == repr(values)
    assert reader.count(1) == len(values)
    assert reader.count(2) == 0
    PublishedPlaces(memory).begin(2)
    assert reader.count(1) == reader.count(2) == 0


@pytest.mark.parametrize(
    ("value", "is_alike"),
    [
        (np.arange(6).reshape(2, 3).T, True),
        ({"a": np.zeros(0, np.uint16), "b": 1}, True),
        (np.array(["a", "bc"]), True),
        (np.zeros(3)[::2], True),
        (np.array([Answered()], object), False),
        (np.zeros(2, [("a", "O"), ("b", "<i4")]), False),
        (np.ma.masked_array([1, 2], [True, False]), False),
        (np.zeros(2).view(np.recarray), False),
        *((value, False) for value in (object(), {"a": {1, 2}}, [np.float64(1)], {(1,): 1}, [[1]], [0] * 17, bool)),
    ],
)
def test_few_numbers_texts_and_arrays_of_them_are_packed_as_data(value: Any, is_alike: bool) -> None:
    assert is_simple(value) is is_alike
    if is_alike:
        packed = PackedEach.of([value])
        target = bytearray(packed.nbytes)
        packed.write(memoryview(target))
        (back,) = (opened() for opened in unpack_each(bytes(target), packed.pieces))
        assert repr(back) == repr(value)
        assert not isinstance(value, np.ndarray) or (back.dtype == value.dtype and back.flags.writeable)


FEW, MANY = 200, 1000


def shards(count: int, each: int | None = None) -> hr.Stream:
    size = each or count
    return hr.stream(put_shards(f"one-by-one-{count}-{size}", [size] * (count // size), 10))


KINDS: dict[str, Any] = {
    "alone": lambda n: (shards(n), {"batch_size": None}),
    "batches of one": lambda n: (shards(n), {"batch_size": 1}),
    "batches of three": lambda n: (shards(n), {"batch_size": 3}),
    "shuffled": lambda n: (shards(n).shuffle(seed=1), {}),
    "filtered": lambda n: (shards(n).filter(lambda _: True), {}),
    "filtered by the loop": lambda n: (shards(n).filter(is_kept_later), {}),
    "skipping": lambda n: (shards(n), {"errors": hr.Skip()}),
    "in any order": lambda n: (shards(n), {"in_order": False}),
    "many shards": lambda n: (shards(n, 50), {}),
    "by number": lambda n: (Numbers(n), {}),
    "as they come": lambda n: (Counting(n), {}),
}


def calls_for(kind: str, count: int, *, is_resumed: bool) -> float:
    data, options = KINDS[kind](count)
    state = state_after(hr.DataLoader(data, **options), 10) if is_resumed else {}
    calls = itertools.count()
    threading.setprofile(lambda frame, event, argument: event == "call" and next(calls))
    try:
        assert len(rest_of(hr.DataLoader(data, **options), state)) > count // 4
    finally:
        threading.setprofile(None)
    return next(calls) / count


@pytest.mark.slow
@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_for_a_sample_do_not_depend_on_the_number_of_samples(kind: str, is_resumed: bool) -> None:
    few, many = (calls_for(kind, count, is_resumed=is_resumed) for count in (FEW, MANY))
    assert many < 1.5 * few
