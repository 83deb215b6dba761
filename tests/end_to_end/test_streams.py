"""Streams of tar shards give the same batches by every way of asking for them."""

import random
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from builders import loops
from builders.loops import flat, given_later, iterated_later, lists, loaded
from builders.tars import number_of, numbered_samples, put_shards, tar, wanted_sample
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.fetch.stores import memory
from headrace.testing.decoders import same

pytestmark = pytest.mark.usefixtures("warm_server")
COUNTS = (7, 1, 12, 5)
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("streams", COUNTS)


def wanted(urls: list[str]) -> list[dict[str, Any]]:
    samples, first = [], 0
    for url, count in zip(urls, COUNTS, strict=True):
        samples += [wanted_sample(url, key, fields) for key, fields in numbered_samples(first, count)]
        first += count
    return samples


def as_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "n": int(sample["cls"]),
        "head": np.frombuffer(sample["bin"], np.uint8)[:600].copy(),
        "key": sample["__key__"],
    }


def test_stream_is_iterated_without_a_loader(urls: list[str]) -> None:
    assert list(hr.stream(urls)) == iterated_later(hr.stream(urls)) == wanted(urls)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_batches_do_not_depend_on_workers(urls: list[str], num_workers: int) -> None:
    data = hr.stream(urls).shuffle(seed=5).map(as_arrays)
    expected = loaded(data, batch_size=4)
    assert same(loaded(data, batch_size=4, num_workers=num_workers), expected)
    small = {"fetch": hr.Fetch(range_bytes=512 * 3, concurrency=2), "prefetch_factor": 1}
    assert same(given_later(data, collate_fn=None, num_workers=num_workers, **small), expected)


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
    assert flat(lists(loaded(short))) == flat(lists(short)) == list(range(24))


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
