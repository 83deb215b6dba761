"""Streams of tar shards give the same batches by every way of asking for them, and each shuffle every sample once."""

import itertools
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import loops
from builders.loops import flat, given_later, iterated_later, lists, loaded
from builders.numbers import Numbers, streamed
from builders.tars import number_of, numbered_samples, numbers_of, put_index, put_shards, tar, wanted_sample
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.fetch.stores import memory

pytestmark = pytest.mark.usefixtures("warm_server")


def wanted(urls: list[str]) -> list[dict[str, Any]]:
    samples, first = [], 0
    for url, count in zip(urls, COUNTS, strict=True):
        samples += [wanted_sample(url, key, fields) for key, fields in numbered_samples(first, count)]
        first += count
    return samples


def test_stream_is_iterated_without_a_loader(urls: list[str]) -> None:
    assert list(hr.stream(urls)) == iterated_later(hr.stream(urls)) == wanted(urls)


def test_alternatives_of_fields_are_taken_in_their_order() -> None:
    samples = [("a", {"png": b"1", "cls": b"0"}), ("b", {"JPG": b"2", "cls": b"1"}), ("c", {"jpg": b"3", "png": b"4"})]
    memory.put("memory://alternatives/0.tar", tar([(k, {"cls": b"9", **f}) for k, f in samples]))
    data = hr.stream("memory://alternatives/0.tar").to_tuple("jpg;png", "cls")
    assert list(data) == [(b"1", b"0"), (b"2", b"1"), (b"3", b"9")]


def test_stream_batches_its_samples_and_maps_batches(urls: list[str]) -> None:
    data = hr.stream(urls).map(number_of).batch(4).map(lambda batch: batch.sum())
    assert [int(s) for s in loaded(data)] == [sum(range(k, min(k + 4, TOTAL))) for k in range(0, TOTAL, 4)]
    assert [int(s) for s in loaded(data, batch_size=None)] == [int(s) for s in loaded(data)]
    assert [int(s) for s in data] == [int(s) for s in loaded(data)]  # it is collated also where no loader is named
    assert list(hr.from_map([[1, 2], [3, 4]]).batch(2).apply(lambda batches: (str(one) for one in batches))) == [
        "[tensor([1, 3]), tensor([2, 4])]"
    ]
    short = hr.stream(urls).map(number_of).batch(4, drop_last=True)
    assert flat(lists(loaded(short))) == flat(lists(short)) == list(range(TOTAL))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_sees_the_samples_themselves(urls: list[str], num_workers: int) -> None:
    def collate(samples: list[Any]) -> tuple[list[str], int]:
        assert type(samples) is list
        return [s["__key__"] for s in samples], sum(len(s["bin"]) for s in samples)

    batches = loaded(hr.stream(urls), batch_size=4, collate_fn=collate, num_workers=num_workers)
    samples = wanted(urls)
    assert batches == [collate(samples[k : k + 4]) for k in range(0, TOTAL, 4)]


def drawn(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["cls"]), int(hr.rng().integers(2**40))


def test_without_workers_the_trainers_generators_are_left_alone(urls: list[str]) -> None:
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    loaded(hr.stream(urls).shuffle().map(drawn), batch_size=4)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


RUNS = {
    "counts": st.lists(st.integers(1, 9), min_size=1, max_size=5),
    "size": st.sampled_from([1, 400, 3000]),
    "range_blocks": st.sampled_from([1, 2, 5, 1000]),
    "reads": st.sampled_from([1, 3, 64]),
    "window": st.none() | st.integers(1, 20),
    "keep": st.sampled_from([None, 2, 3]),
    "take": st.one_of(st.none(), st.integers(0, 30)),
    "is_async": st.booleans(),
}
OPTIONS = {
    "batch_size": st.integers(1, 9),
    "prefetch_factor": st.sampled_from([0, 1, 4]),
    "drop_last": st.booleans(),
    "in_order": st.booleans(),
    "memory_budget": st.sampled_from(["auto", "1KiB", "20MiB"]),
}


@settings(max_examples=60)
@given(run=st.fixed_dictionaries(RUNS), options=st.fixed_dictionaries(OPTIONS))
def test_each_sample_is_emitted_once_in_the_order_of_the_plan(run: dict[str, Any], options: dict[str, Any]) -> None:
    counts, size, keep, take, batch_size = run["counts"], run["size"], run["keep"], run["take"], options["batch_size"]
    urls = put_shards(uuid.uuid4().hex, counts, size)
    data = hr.stream(urls)
    plan = [f"{n:06d}" for n in range(sum(counts))]
    if run["window"] is not None:
        data = data.shuffle(window=run["window"])
        plan = [sample["__key__"] for sample in data]
        assert sorted(plan) == [f"{n:06d}" for n in range(sum(counts))]
    if keep is not None:
        data = data.filter(lambda sample: int(sample["cls"]) % keep == 0)
        plan = [key for key in plan if int(key) % keep == 0]
    if take is not None:
        data, plan = data.take(take), plan[:take]
    if options["drop_last"]:
        plan = plan[: len(plan) // batch_size * batch_size]
    fetch = hr.Fetch(range_bytes=512 * run["range_blocks"], concurrency=run["reads"])
    batches = (given_later if run["is_async"] else loops.given)(data, fetch=fetch, timeout=5, **options)
    expected = [plan[k : k + batch_size] for k in range(0, len(plan), batch_size)]
    got = [[sample["__key__"] for sample in batch] for batch in batches]
    assert got == expected if options["in_order"] else sorted(got) == sorted(expected)
    bodies = dict(numbered_samples(0, sum(counts), size))
    for batch in batches:
        for sample in batch:
            assert {"bin": sample["bin"], "cls": sample["cls"]} == bodies[sample["__key__"]]
    for url in urls:
        memory.remove(url)


def test_fields_are_decoded_that_are_selected_or_made_after_a_selection() -> None:
    def with_json(sample: dict[str, Any]) -> dict[str, Any]:
        return {"__key__": sample["__key__"], "cls": sample["cls"], "x.json": b'{"a": 1}'}

    data = hr.stream(put_shards("narrow", [3]), index=None)
    made = list(data.select("cls").map(with_json).decode())
    assert [(sample["cls"], sample["x.json"]) for sample in made] == [(n, {"a": 1}) for n in range(3)]
    url = f"memory://{uuid.uuid4().hex}/0.tar"
    memory.put(url, tar([("a", {"cls": b"7", "json": b"no JSON"})]))
    assert list(hr.stream(url, index=None).decode().to_tuple("cls")) == [(7,)]
    with pytest.raises(hr.DecodeError, match="json"):
        list(hr.stream(url, index=None).decode())


COUNTS = (9, 0, 14, 1, 30, 6)
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("shuffles", COUNTS)


@pytest.fixture(scope="module")
def index(urls: list[str]) -> str:
    return put_index(urls, "shuffles")


def epochs_of(data: hr.Stream, count: int = 1, **options: Any) -> list[list[int]]:
    with hr.DataLoader(data, batch_size=4, collate_fn=numbers_of, **options) as loader:
        return [list(itertools.chain.from_iterable(loader)) for _ in range(count)]


SOURCES: dict[str, Callable[[list[str], str], Any]] = {
    "indexed": lambda urls, index: hr.stream(urls, index=index),
    "unindexed": lambda urls, index: hr.stream(urls, index=None),
    "keys": lambda urls, index: Numbers(TOTAL),
    "iterator": lambda urls, index: streamed(range(TOTAL)),
}
WAYS = [
    *(("indexed", by) for by in ("shards", "within", "window", "global", "auto")),
    *(("unindexed", by) for by in ("shards", "window", "buffer", "auto")),
    *(("keys", by) for by in ("window", "global", "auto")),
    *(("iterator", by) for by in ("buffer", "window", "auto")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "by"), WAYS)
def test_each_epoch_has_each_sample_in_another_order(urls: list[str], index: str, source: str, by: Any) -> None:
    data = SOURCES[source](urls, index)
    more = {"window": {"window": 16}, "buffer": {"buffer": 8}}.get(by, {})
    orders = epochs_of(data.shuffle(by, **more), 2) + epochs_of(data.shuffle(by, seed=9, **more))
    for order in orders:
        assert sorted(order) == list(range(TOTAL))
    assert len(set(map(tuple, [*orders, range(TOTAL)]))) == 4
    if source != "iterator" or by == "buffer":  # windows of these combine both seeds
        assert epochs_of(data.shuffle(by, **more), seed=9) == orders[2:]
    assert epochs_of(data.shuffle(by, **more), 2) == orders[:2]
    assert epochs_of(data.shuffle(by, seed=9, **more)) == orders[2:]


def shard_of(number: int) -> int:
    return int(np.searchsorted(np.cumsum(COUNTS), number, side="right"))


def test_whole_shards_keep_the_order_of_their_samples(urls: list[str], index: str) -> None:
    for data in (hr.stream(urls, index=index), hr.stream(urls, index=None)):
        (order,) = epochs_of(data.shuffle("shards"))
        runs = [list(run) for _, run in itertools.groupby(order, shard_of)]
        assert len(runs) == sum(count > 0 for count in COUNTS)
        assert all(run == sorted(run) for run in runs)
        assert [run[0] for run in runs] != sorted(run[0] for run in runs)


def test_samples_that_are_shuffled_within_stay_in_their_shards(urls: list[str], index: str) -> None:
    (order,) = epochs_of(hr.stream(urls, index=index).shuffle("within"))
    assert [shard_of(number) for number in order] == [shard_of(number) for number in range(TOTAL)]


def test_samples_leave_a_buffer_no_sooner_than_they_have_come() -> None:
    (order,) = epochs_of(streamed(range(TOTAL)).shuffle(buffer=5))
    assert all(number <= place + 5 for place, number in enumerate(order))
    (order,) = epochs_of(streamed(range(TOTAL)).shuffle(buffer=1000))
    assert sorted(order) == list(range(TOTAL))


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = [0.0] * 50 + [1.0, 3.0]
    (drawn,) = epochs_of(Numbers(52).sample(weights=weights, count=4000))
    assert len(drawn) == 4000
    assert set(drawn) == {50, 51}
    assert abs(drawn.count(51) - 3000) < 200  # 7 standard deviations
    (once,) = epochs_of(Numbers(52).sample(weights=[1.0] * 52, replacement=False))
    assert sorted(once) == list(range(52)) != once
    (some,) = epochs_of(Numbers(52).sample(count=10, replacement=False))
    assert len(set(some)) == len(some) == 10
    first, second = epochs_of(Numbers(52).sample(count=300), 2)
    assert first != second
    assert len(set(first)) > 40


def test_each_repetition_has_each_sample_once_in_another_order(urls: list[str], index: str) -> None:
    plain = hr.stream(urls, index=None)
    for data in (hr.stream(urls, index=index).shuffle(window=16), plain.shuffle(window=16), plain.shuffle(buffer=7)):
        (order,) = epochs_of(data.repeat(3))
        passes = [order[k * TOTAL : (k + 1) * TOTAL] for k in range(3)]
        assert all(sorted(one) == list(range(TOTAL)) for one in passes)
        assert len(set(map(tuple, passes))) == 3


@pytest.mark.slow
def test_an_endless_stream_ends_where_it_is_told_to(urls: list[str], index: str) -> None:
    data = hr.stream(urls, index=index).shuffle()
    with pytest.raises(TypeError, match="has no end"):
        len(data.repeat())
    assert len(epochs_of(data.repeat().take(150))[0]) == len(data.repeat().take(150)) == 150
    assert epochs_of(data.repeat().epoch(samples=20)) == epochs_of(data.epoch(samples=20))
    assert len(epochs_of(data.epoch(samples=20))[0]) == len(data.repeat().epoch(samples=20)) == 20
    assert len(epochs_of(hr.stream(urls, index=None).repeat().take(150))[0]) == 150
    with hr.DataLoader(data.repeat(), batch_size=4) as loader:
        assert len(list(itertools.islice(loader, 40))) == 40


def test_shards_without_samples_are_not_repeated_for_ever() -> None:
    data = hr.stream(put_shards("nothing", [0, 0]), index=None)
    for endless in (data.repeat(), data.epoch(samples=10)):
        with pytest.raises(hr.OptionError, match=r"2 shards, .*memory://nothing/0.tar .*no samples"):
            epochs_of(endless)


WRONG: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("buffer= is for", lambda indexed, plain: plain.shuffle("window", buffer=3)),
    ("window= is for", lambda indexed, plain: indexed.shuffle("global", window=3)),
    ("window=0 must be", lambda indexed, plain: indexed.shuffle(window=0)),
    ("one of", lambda indexed, plain: indexed.shuffle("widow")),
    ("'window' or 'global' for samples with numbers", lambda indexed, plain: indexed.shuffle("buffer")),
    ("without an index", lambda indexed, plain: plain.shuffle("within")),
    ("by the numbers of the source", lambda indexed, plain: indexed.repeat(2).sample([1])),
    ("1 or more", lambda indexed, plain: indexed.repeat(0)),
    ("1 or more", lambda indexed, plain: indexed.epoch(samples=0)),
    ("have no numbers before they are read", lambda indexed, plain: plain.sample(count=3)),
    ("give the sampler alone", lambda indexed, plain: indexed.sample([1, 2], count=3)),
]


@pytest.mark.parametrize(("text", "use"), WRONG)
def test_wrong_shuffles_are_refused(urls: list[str], index: str, text: str, use: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(hr.OptionError, match=text):
        use(hr.stream(urls, index=index), hr.stream(urls, index=None))
