"""Shards with an index give what they give without one, and their samples have numbers and keys."""

import asyncio
import copy
import pickle
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.loops import loaded
from builders.tars import Fields, numbered_samples, put_index, put_shards, tar
from hypothesis import example, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.fetch.stores import memory
from headrace.testing import FaultServer

COUNTS = (7, 0, 1, 12, 5)
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("indexed", COUNTS)


@pytest.fixture(scope="module")
def index(urls: list[str]) -> str:
    return put_index(urls, "indexed")


@pytest.fixture
def data(urls: list[str], index: str) -> hr.Stream:
    return hr.stream(urls, index=index)


def samples_of(data: Any, **options: Any) -> list[Any]:
    return loaded(data, batch_size=None, **options)


def as_numbers(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(sample["cls"]), "size": len(sample["bin"]), "key": sample["__key__"]}


# Fields are absent, empty, of a few bytes, or of more than a request.
BODY = st.sampled_from([None, 0, 0, 1, 511, 512, 513, 1500, 5000])
SAMPLE = st.tuples(BODY, BODY, BODY).filter(lambda sizes: any(size is not None for size in sizes))
SHARDS = st.lists(st.lists(SAMPLE, max_size=9), min_size=1, max_size=4)


def put_drawn(shards: list[list[tuple[int | None, ...]]]) -> list[str]:
    rng, name, urls = random.Random(1), uuid.uuid4().hex, []
    for k, sizes in enumerate(shards):
        samples: list[tuple[str, Fields]] = [
            (f"{k}-{n}", {f: rng.randbytes(size) for f, size in zip("abc", one, strict=True) if size is not None})
            for n, one in enumerate(sizes)
        ]
        urls.append(f"memory://{name}/{k}.tar")
        memory.put(urls[-1], tar(samples))
    return urls


def outcome(data: hr.Stream, options: dict[str, Any]) -> list[Any]:
    got: list[Any] = []
    with hr.DataLoader(data, batch_size=None, **options) as loader:
        try:
            got += loader
        except hr.errors.FormatError as error:
            got.append((type(error), str(error)))
    return got


STEPS: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "nothing": lambda data: data,
    "a": lambda data: data.to_tuple("__key__", "a"),
    "b or c": lambda data: data.select("b;c"),
    "key": lambda data: data.to_tuple("__key__"),
    "a and c": lambda data: data.decode().select("a", "c"),
    "some keys": lambda data: data.filter(is_even, field="__key__"),
    "some keys of c": lambda data: data.filter(is_even, field="__key__").to_tuple("__key__", "c"),
}


def is_even(key: str) -> bool:
    return int(key.partition("-")[2]) % 2 == 0


@pytest.mark.slow
@settings(max_examples=80)
@given(
    shards=SHARDS,
    window=st.sampled_from([None, None, 1, 2, 5, 100]),
    take=st.none() | st.integers(0, 12),
    step=st.sampled_from(sorted(STEPS)),
    range_bytes=st.sampled_from([512, 1024, 4096, 2**22]),
    gap=st.sampled_from([0, 512, 2000, 16384]),
    crc=st.booleans(),
)
@example([[(0, 5000, 1500)] * 6, [(0, 5000, 0)] * 3, [(0, 0, 7)]], 4, None, "a and c", 1024, 0, True)
def test_any_shards_are_read_by_member_as_they_are_without_an_index(
    shards: list[list[tuple[int | None, ...]]],
    window: int | None,
    take: int | None,
    step: str,
    range_bytes: int,
    gap: int,
    crc: bool,
) -> None:
    urls = put_drawn(shards)
    index = put_index(urls, "drawn", crc=crc)
    options = {"fetch": hr.Fetch(range_bytes=range_bytes, gap_bytes=gap)}
    results = []
    for data in (hr.stream(urls, index=index), hr.stream(urls, index=None)):
        chosen = STEPS[step](data)
        if window is not None and "keys" not in step:
            chosen = STEPS[step](data.shuffle("window", window=window, seed=3))
        elif take is not None:
            chosen = chosen.take(take)
        results.append(outcome(chosen, options))
    if window is None or "keys" in step:
        assert results[0] == results[1]
    else:  # each ends where the first sample comes that lacks a field, and that depends on the order
        failed = [bool(got) and isinstance(got[-1][0] if isinstance(got[-1], tuple) else None, type) for got in results]
        assert failed[0] == failed[1]
        assert failed[0] or sorted(map(repr, results[0])) == sorted(map(repr, results[1]))


@pytest.mark.slow
@settings(max_examples=40)
@given(shards=SHARDS, step=st.sampled_from(sorted(STEPS)), crc=st.booleans())
def test_any_sample_is_the_same_by_its_number(shards: list[list[tuple[int | None, ...]]], step: str, crc: bool) -> None:
    urls = put_drawn(shards)
    data = hr.stream(urls, index=put_index(urls, "drawn", crc=crc))
    expected = outcome(STEPS[step](hr.stream(urls, index=None)), {})
    by_number = data.slice(0) if "keys" not in step else data
    assert outcome(STEPS[step](by_number), {}) == expected
    if step == "nothing" and expected:
        numbers = random.Random(2).choices(range(len(expected)), k=3)
        assert [data[n] for n in numbers] == [expected[n] for n in numbers]
        assert outcome(data.sample(numbers), {}) == [expected[n] for n in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["in order", "window", "global"])
def test_a_small_memory_budget_is_enough(order: Any) -> None:
    urls = put_shards(f"budget-{order}", [40] * 10, size=30_000)
    data = hr.stream(urls, index=put_index(urls))
    data = data if order == "in order" else data.shuffle(order, seed=50)
    fetch = hr.Fetch(range_bytes=2**17)
    with hr.DataLoader(data.map(as_numbers), batch_size=8, memory_budget=2**20, fetch=fetch) as loader:
        for _ in range(2):
            assert sorted(int(n) for batch in loader for n in batch["n"]) == list(range(400))
        assert loader.stats().fetch.input_bytes == loader.stats().fetch.claimed_bytes == 0


def test_unread_fields_do_not_change_windows(urls: list[str], index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pipeline.epoch_orders.WINDOW_BYTES", 3000)  # the bytes of a few whole samples

    data = hr.stream(urls, index=index).shuffle(seed=8)
    one, both = (keys_of(data.select("__key__", *names)) for names in (["cls"], ["bin", "cls"]))
    assert one == both != sorted(one)


@pytest.fixture(scope="module")
def wanted(urls: list[str]) -> list[dict[str, Any]]:
    return list(hr.stream(urls, index=None))


def keys_of(data: Any, **options: Any) -> list[str]:
    return [sample["__key__"] for sample in samples_of(data, **options)]


def test_an_indexed_stream_has_a_length_numbers_and_keys(data: hr.Stream, wanted: list[dict[str, Any]]) -> None:
    assert len(data) == len(data.shuffle("global")) == TOTAL
    assert list(data.keys()) == [sample["__key__"] for sample in wanted]
    assert [data[0], data[7], data[-1], data[torch.tensor(9)]] == [wanted[0], wanted[7], wanted[-1], wanted[9]]
    assert [len(data.take(3)), len(data.take(99)), len(data.slice(20)), len(data.batch(4))] == [3, TOTAL, 5, 7]
    assert [len(hr.DataLoader(data, batch_size=4, drop_last=drop_last)) for drop_last in (False, True)] == [7, 6]


@pytest.mark.parametrize(
    ("key", "error"),
    [*((n, IndexError) for n in (TOTAL, -TOTAL - 1, 10**30)), *((k, TypeError) for k in (slice(0, 3), "000001", 1.0))],
)
def test_a_key_that_names_no_sample_is_an_error(data: hr.Stream, key: Any, error: type[Exception]) -> None:
    for get in (lambda: data[key], lambda: asyncio.run(data.aget(key))):
        with pytest.raises(error):
            get()


def test_samples_are_got_by_number_with_their_steps_in_any_loop(data: hr.Stream, wanted: list[dict[str, Any]]) -> None:
    async def double(sample: dict[str, Any]) -> int:
        return 2 * sample["n"]

    async def main() -> list[Any]:
        assert data[3] == wanted[3]  # also where a loop is running
        return [await data.aget(-2), *await asyncio.gather(*(data.aget(n) for n in range(TOTAL)))]

    assert asyncio.run(main()) == [wanted[-2], *wanted]
    assert data.map(as_numbers).map(double)[8] == 16
    with pytest.raises(TypeError, match="number"):
        data.shuffle()[0]


def test_only_the_fields_that_are_named_are_read_of_a_sample(server: FaultServer) -> None:
    url = server.add("one.tar", tar(numbered_samples(0, 12, 700)))
    data = hr.stream(url, index=put_index([url]))
    server.log.clear()
    both, one = data.select("bin", "cls")[9], data.select("cls")[9]
    assert both == {**one, "bin": both["bin"]}
    assert int(one["cls"]) == data.to_tuple("cls").map(lambda fields: int(fields[0]))[9] == 9
    ranges = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.log]
    lengths = [int(stop) + 1 - int(start) for start, stop in ranges]
    assert lengths[0] > len(both["bin"])
    assert lengths[1:] == [len(one["cls"])] * 2


def test_subsets_are_what_their_numbers_say(data: hr.Stream, wanted: list[dict[str, Any]]) -> None:
    chosen = [5, 3, 3, 24, 0]
    assert samples_of(data.sample(chosen)) == [wanted[n] for n in chosen]
    assert samples_of(data.slice(4, 20, 3)) == wanted[4:20:3]
    assert samples_of(data.slice(4).take(3)) == wanted[4:7]
    assert samples_of(data.sample(chosen).slice(1, 3)) == [wanted[3], wanted[3]]
    assert samples_of(data.slice(0, 0)) == []
    assert sorted(keys_of(data.take(5).shuffle(seed=1))) == [sample["__key__"] for sample in wanted[:5]]
    with pytest.raises(hr.OptionError, match="no sample 25"):
        samples_of(data.sample([25]))


def test_a_sampler_is_asked_anew_each_epoch(data: hr.Stream) -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = torch.utils.data.RandomSampler(range(TOTAL), generator=generator)
    with hr.DataLoader(data.sample(sampler).map(as_numbers), batch_size=5) as loader:
        assert len(loader) == 5
        epochs = [[int(n) for batch in loader for n in batch["n"]] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(TOTAL))


def is_third(key: str) -> bool:
    return int(key) % 3 == 0


async def is_third_async(key: str) -> bool:
    return is_third(key)


FILTERED: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "in order": lambda data: data.filter(is_third, field="__key__"),
    "twice": lambda data: data.filter(is_third, field="__key__").filter(str.isdigit, field="__key__"),
    "after take": lambda data: data.take(10).filter(is_third, field="__key__"),
    "before take": lambda data: data.filter(is_third, field="__key__").take(5),
    "by a coroutine": lambda data: data.filter(is_third_async, field="__key__"),
    "after a map": lambda data: data.map(as_numbers).filter(is_third, field="key"),
    "with fields": lambda data: data.filter(is_third, field="__key__").select("cls"),
    "after a shuffle of shards": lambda data: data.shuffle("shards", seed=3).filter(is_third, field="__key__"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("chosen", FILTERED.values(), ids=FILTERED)
def test_a_filter_on_keys_keeps_the_same_with_and_without_an_index(
    urls: list[str], data: hr.Stream, chosen: Callable[[hr.Stream], hr.Stream], workers: int, warm_server: None
) -> None:
    expected = samples_of(chosen(hr.stream(urls, index=None)), num_workers=workers)
    assert samples_of(chosen(data), num_workers=workers) == expected
    assert len(expected) >= 4


def test_a_filter_on_keys_has_a_length(data: hr.Stream) -> None:
    kept = data.filter(is_third, field="__key__")
    chosen = data.shuffle("global", seed=1).filter(is_third, field="__key__")
    keys = keys_of(chosen)
    assert len(kept) == len(chosen) == len(keys) == 9
    assert keys != sorted(keys) == [f"{n:06d}" for n in range(0, TOTAL, 3)]
    assert [len(chosen.slice(2, 4)), len(chosen.take(3))] == [2, 3]
    assert keys_of(kept.slice(2, 4)) == ["000006", "000009"]


@pytest.mark.parametrize("by", ["window", "global"])
def test_an_error_in_a_filter_on_keys_is_the_users_own(data: hr.Stream, by: Any) -> None:
    def fails(key: str) -> bool:
        raise KeyError(key)

    with pytest.raises(KeyError, match="0000"):
        samples_of(data.shuffle(by).filter(fails, field="__key__"))


def test_a_stream_with_an_index_is_copied_and_pickled(data: hr.Stream, wanted: list[dict[str, Any]]) -> None:
    chosen = data.shuffle("global", seed=2).filter(is_third, field="__key__").to_tuple("__key__", "cls")
    expected = list(chosen)
    assert len(data) == TOTAL
    for other in (copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen)), copy.copy(chosen)):
        assert list(other) == expected
    assert pickle.loads(pickle.dumps(data))[2] == wanted[2]
    assert len(pickle.dumps(data)) < 1000


def test_torchs_own_loader_takes_a_stream_with_an_index(data: hr.Stream, wanted: list[dict[str, Any]]) -> None:
    loader = torch.utils.data.DataLoader(data.map(as_numbers), batch_size=4)
    assert [int(n) for batch in loader for n in batch["n"]] == list(range(TOTAL))
