"""Single samples are made in groups and delivered as if made alone, at a cost that does not depend on their number."""

import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from builders.loops import loaded, rest_of, state_after
from builders.numbers import Counting, Numbers, is_kept_later
from builders.tars import put_shards
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace._util.shared_memory import PublishedPlaces, end_of
from headrace.torch_compat.serialize import PackedEach, is_simple, unpack_each

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


def test_packed_values_come_back_each_by_itself() -> None:
    values: list[Any] = [1, "two", {"three": [3, (b"3",)]}, np.arange(4), {"a": np.zeros(3), "b": np.ones(2)}, None]
    packed = PackedEach()
    for value in values:
        packed.add(value)
        packed.skip()
    target = bytearray(packed.nbytes)
    packed.write(memoryview(target))
    assert end_of(packed.pieces) == len(target)
    assert repr([opened() for opened in unpack_each(bytes(target), packed.pieces)]) == repr(values)


@given(sizes=st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=40), room=st.integers(1, 20))
def test_published_values_can_be_read_before_the_others_are_made(sizes: list[list[int]], room: int) -> None:
    memory, packed, values = memoryview(bytearray(PublishedPlaces.NBYTES + room * 512)), PackedEach(), list[object]()
    reader, writer = PublishedPlaces(memory), PublishedPlaces(memory)
    for number, lengths in enumerate(sizes):
        values.append((number, [np.arange(length, dtype=np.uint8) for length in lengths]))
        packed.add(values[-1])
        if not packed.publish(memory, writer):
            del values[-1]
            assert packed.nbytes > room * 512 or sum(2 + 2 * len(each) for each in sizes) > 255 - 1
            break
        assert repr([opened() for opened in unpack_each(bytes(memory), reader.read())]) == repr(values)
    assert len(reader.read()) == len(values)
    reader.clear()
    assert reader.read() == []


@pytest.mark.parametrize(
    "value", [object(), {"a": {1, 2}}, [np.float64(1)], {(1,): 1}, [[1]], list(range(17)), True.__class__]
)
def test_objects_are_not_packed_as_data(value: Any) -> None:
    assert not is_simple(value)


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
    ],
)
def test_arrays_of_numbers_and_texts_are_packed_as_data_where_allowed(value: Any, is_alike: bool) -> None:
    assert is_simple(value) is is_alike
    if is_alike:
        packed = PackedEach.of([value])
        target = bytearray(packed.nbytes)
        packed.write(memoryview(target))
        (back,) = (opened() for opened in unpack_each(bytes(target), packed.pieces))
        assert repr(back) == repr(value)
        assert not isinstance(value, np.ndarray) or (back.dtype == value.dtype and back.flags.writeable)


FEW, MANY = 250, 2000


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
