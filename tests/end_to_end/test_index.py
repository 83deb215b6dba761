"""Shards with an index give what they give without one, and in the same order where they are not shuffled."""

from __future__ import annotations

import io
import random
import uuid
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from end_to_end.tars import Fields, put_index, put_shards, same, tar
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.fetch.stores import memory

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


def all_of(data: Any, **options: Any) -> list[Any]:
    with hr.DataLoader(data, **options) as loader:
        return list(loader)


def samples_of(data: Any, **options: Any) -> list[Any]:
    return all_of(data, batch_size=None, **options)


def as_numbers(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(sample["cls"]), "size": len(sample["bin"]), "key": sample["__key__"]}


ORDERS: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "in order": lambda data: data,
    "the first ones": lambda data: data.take(11),
    "none": lambda data: data.take(0),
}
SHUFFLES: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "shuffled": lambda data: data.shuffle(seed=5),
    "in small windows": lambda data: data.shuffle("window", window=3, seed=6),
    "by shards": lambda data: data.shuffle("shards", seed=6),
    "twice": lambda data: data.shuffle("window", window=7, seed=6).repeat(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_and_without_an_index(
    urls: list[str], data: hr.Stream, order: Callable[[hr.Stream], hr.Stream], workers: int, warm_server: None
) -> None:
    for options in ({}, {"drop_last": True}, {"fetch": hr.FetchOptions(range_bytes=1024), "prefetch_factor": 1}):
        options |= {"batch_size": 4, "num_workers": workers}
        expected = all_of(order(hr.stream(urls, index=None)).map(as_numbers), **options)
        assert same(all_of(order(data).map(as_numbers), **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("order", SHUFFLES.values(), ids=SHUFFLES)
def test_shuffled_samples_are_the_same_with_and_without_an_index(
    urls: list[str], data: hr.Stream, order: Callable[[hr.Stream], hr.Stream]
) -> None:
    without = order(hr.stream(urls, index=None))
    for options in ({}, {"fetch": hr.FetchOptions(range_bytes=1024, gap_bytes=0)}):
        with hr.DataLoader(order(data), batch_size=None, **options) as loader, hr.DataLoader(without, None) as other:
            for _ in range(2):
                got, expected = list(loader), list(other)
                assert by_key(got) == by_key(expected)
                assert got != by_key(got)


def by_key(samples: list[Any]) -> list[Any]:
    """Samples, or tuples that begin with a key, by their keys."""
    return sorted(samples, key=lambda sample: sample["__key__"] if isinstance(sample, dict) else sample[0])


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
    """All samples, and the first error as its type and text."""
    got: list[Any] = []
    with hr.DataLoader(data, batch_size=None, **options) as loader:
        try:
            got += loader
        except hr.FormatError as error:
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
    options = {"fetch": hr.FetchOptions(range_bytes=range_bytes, gap_bytes=gap)}
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
@pytest.mark.parametrize("names", [("c",), ("a", "c"), ("b", "a")])
@pytest.mark.parametrize("gap", [0, 16384])
def test_empty_members_that_lie_in_no_request_do_not_confuse_the_others(gap: int, names: tuple[str, ...]) -> None:
    urls = put_drawn([[(0, 5000, 1500)] * 6, [(0, 5000, 0)] * 3, [(0, 100, 0), (7, 0, 0), (0, 0, 7)]])
    options = {"fetch": hr.FetchOptions(gap_bytes=gap, range_bytes=1024)}
    plain, indexed = hr.stream(urls, index=None), hr.stream(urls, index=put_index(urls, "confuse"))
    for window in (1, 4, 100):
        expected = samples_of(plain.shuffle("window", window=window, seed=1).select(*names), **options)
        found = samples_of(indexed.shuffle("window", window=window, seed=1).select(*names), **options)
        assert by_key(found) == by_key(expected)


def tables(name: str) -> list[str]:
    """Shards of arrays and numbers, as people train from."""
    urls = []
    for k in range(3):
        samples: list[tuple[str, Fields]] = []
        for n in range(20):
            file = io.BytesIO()
            np.save(file, np.full((3, 4), 20 * k + n, np.float32))
            samples.append((f"{k}{n:03d}", {"npy": file.getvalue(), "cls": b"%d" % n, "json": b'{"n": %d}' % n}))
        urls.append(f"memory://{name}/{k}.tar")
        memory.put(urls[-1], tar(samples))
    return urls


@pytest.mark.slow
@pytest.mark.parametrize("names", [("npy", "cls"), ("json", "npy"), ("__key__", "cls")])
@pytest.mark.parametrize("workers", [0, 2])
def test_decoded_tuples_are_the_same_with_and_without_an_index(
    names: tuple[str, ...], workers: int, warm_server: None
) -> None:
    urls = tables("tables")
    index = put_index(urls, "tables")
    results = []
    for data in (hr.stream(urls, index=index), hr.stream(urls, index=None)):
        chosen = data.decode().to_tuple(*names)
        results.append(all_of(chosen, batch_size=7, num_workers=workers, fetch=hr.FetchOptions(range_bytes=4096)))
    assert same(*results)
    shuffled = hr.stream(urls, index=index).shuffle("window", seed=2, window=16).decode().to_tuple(*names)
    got = samples_of(shuffled, num_workers=workers, fetch=hr.FetchOptions(range_bytes=4096))
    plain = samples_of(hr.stream(urls, index=None).decode().to_tuple(*names))
    assert sorted(map(str, got)) == sorted(map(str, plain)) != list(map(str, got))
    numbered = all_of(hr.stream(urls, index=index).slice(0).decode().to_tuple(*names), batch_size=7)
    assert same(numbered, all_of(hr.stream(urls, index=None).decode().to_tuple(*names), batch_size=7))


@pytest.mark.parametrize("order", ["in order", "window", "global"])
def test_a_loop_over_an_indexed_stream_may_be_left_at_any_time(data: hr.Stream, order: Any) -> None:
    chosen = data if order == "in order" else data.shuffle(order, seed=1)
    for _ in range(3):
        assert len(list(islice(chosen, 2))) == 2
    with hr.DataLoader(chosen, batch_size=1) as loader:
        for _ in range(3):
            next(iter(loader))
    assert len(list(chosen)) == TOTAL


@pytest.mark.slow
@pytest.mark.parametrize("order", ["in order", "window", "global"])
def test_a_small_memory_budget_is_enough(order: Any) -> None:
    urls = put_shards(f"budget-{order}", [40] * 10, size=30_000)
    data = hr.stream(urls, index=put_index(urls))
    data = data if order == "in order" else data.shuffle(order, seed=50)
    options = {"batch_size": 8, "memory_budget": 2**20, "fetch": hr.FetchOptions(range_bytes=2**17)}
    with hr.DataLoader(data.map(as_numbers), **options) as loader:
        for _ in range(2):
            assert sorted(int(n) for batch in loader for n in batch["n"]) == list(range(400))
        assert loader.stats().fetch.input_bytes == loader.stats().fetch.claimed_bytes == 0


def test_fields_that_are_not_read_leave_windows_as_they_are(
    urls: list[str], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.datasets.planning.WINDOW_BYTES", 3000)  # the bytes of a few whole samples

    def keys(*names: str) -> list[Any]:
        data = hr.stream(urls, index=index).shuffle(seed=8).to_tuple("__key__", *names)
        return [sample[0] for sample in samples_of(data)]

    assert keys("cls") == keys("bin", "cls") != sorted(keys("cls"))
