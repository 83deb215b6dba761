"""Shards with an index: the samples are those without one, with numbers and keys, and damage is found."""

import asyncio
import copy
import pickle
import random
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import loops
from builders.loops import by_number, loaded
from builders.tars import Fields, index_file, index_of_archive, number_of, numbered_samples, put_index, put_shards, tar
from hypothesis import example, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.fetch import Reader
from headrace.fetch.stores import memory
from headrace.formats.index import Entry, pack_directory
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
    numbered = by_number(data) if "keys" not in step else data
    assert outcome(STEPS[step](numbered), {}) == expected
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
    with pytest.raises(hr.OptionError, match=r"=25 must be .* below 25"):
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


FILLED = (7, 1, 12, 5)
ALL = list(range(TOTAL))
BAD = 10  # a sample of the third shard

Order = Callable[[hr.Stream], hr.Stream]
ORDERS: dict[str, Order] = {"in order": lambda data: data, "by number": by_number}
ALL_ORDERS = {**ORDERS, "window": lambda data: data.shuffle("window"), "global": lambda data: data.shuffle("global")}
IN_ORDERS = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@pytest.fixture
def shards() -> list[str]:
    return put_shards(uuid.uuid4().hex, FILLED)


def flip(shards: list[str], *numbers: int) -> None:
    """Change one bit of the last field of samples of the third shard."""
    archive = bytearray(asyncio.run(hr.read(shards[2])))
    for number in numbers:
        archive[archive.index(b"%06d.cls" % number) + 512] ^= 1
    memory.put(shards[2], bytes(archive))


def outcomes(data: Any, **options: Any) -> list[Any]:
    return loops.outcomes(data, batch_size=None, **options)


@pytest.mark.slow
@IN_ORDERS
@pytest.mark.parametrize("range_bytes", [512, 4096, 2**22])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_bit_is_an_error_in_the_place_of_its_sample(
    shards: list[str], order: Order, range_bytes: int, workers: int, warm_server: None
) -> None:
    index = put_index(shards)
    flip(shards, BAD)
    data = order(hr.stream(shards, index=index)).map(number_of)
    got = outcomes(data, fetch=hr.Fetch(range_bytes=range_bytes), num_workers=workers)
    error = got.pop(BAD)
    assert got == [n for n in ALL if n != BAD]
    assert isinstance(error, hr.errors.ChecksumError)
    assert (error.key, error.url) == (f"{BAD:06d}", shards[2])
    assert f"{BAD:06d}" in str(error) or f"key {BAD}" in "".join(error.__notes__)


COMBINED: dict[str, Order] = {
    "by number": by_number,
    "slice": lambda data: data.skip(1).slice(2, 24),
    "concat": lambda data: data.concat(hr.from_map(range(3))),
    "zip": lambda data: data.zip(data, hr.from_map(ALL)),
    "mix": lambda data: hr.mix({"a": data, "b": data.concat(hr.from_map(range(9)))}, {"a": 2, "b": 1}),
}


@pytest.mark.parametrize("combine", COMBINED.values(), ids=COMBINED)
def test_neighbours_in_shards_are_read_together_and_verified(shards: list[str], combine: Order, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{k}.tar") for k in range(len(shards))]
    index = put_index(shards)
    expected = combine(hr.stream(shards, index=index).map(number_of))
    data = combine(hr.stream(paths, index=index).map(number_of))
    for damaged in ((), (BAD, BAD + 1)):
        flip(shards, *damaged)
        for path, url in zip(paths, shards, strict=True):
            Path(path).write_bytes(asyncio.run(hr.read(url)))
        got, wanted = outcomes(data), outcomes(expected)
        assert [getattr(one, "key", one) for one in got] == [getattr(one, "key", one) for one in wanted]
        assert sum(type(one) is hr.errors.ChecksumError for one in got) >= len(damaged)
        for some in (data,) if combine is by_number else (data, expected):
            with hr.DataLoader(some, batch_size=5, collate_fn=list) as loader:
                assert damaged or sum(map(len, loader)) > loader.stats().fetch.requests
    Path(paths[2]).write_bytes(b"")
    assert any(isinstance(one, hr.errors.ObjectChangedError) for one in outcomes(data))


@IN_ORDERS
def test_flipped_bit_is_unseen_without_checksums_or_in_an_unread_field(shards: list[str], order: Order) -> None:
    index, unchecked = put_index(shards), put_index(shards, crc=False)
    flip(shards, BAD)
    for chosen in (
        order(hr.stream(shards, index=index)).to_tuple("bin"),
        order(hr.stream(shards, index=index)).select("bin"),
    ):
        got = outcomes(chosen)
        assert len(got) == TOTAL
        assert not any(isinstance(one, Exception) for one in got)
    got = outcomes(order(hr.stream(shards, index=unchecked)))
    assert [sample["cls"] == str(n).encode() for n, sample in enumerate(got)] == [n != BAD for n in ALL]


def serve(server: FaultServer, *faults: str) -> tuple[str, str]:
    """A shard with these faults, and its index."""
    name = uuid.uuid4().hex
    url = server.add(f"{name}.tar", tar(numbered_samples(0, TOTAL)))
    index = put_index([url])
    server.add(f"{name}.tar", server.objects[f"{name}.tar"], *faults)
    server.log.clear()
    return url, index


@pytest.mark.slow
@IN_ORDERS
@pytest.mark.parametrize("cached", [False, True])
def test_wrong_bytes_are_requested_once_more(server: FaultServer, order: Order, cached: bool, tmp_path: Any) -> None:
    url, index = serve(server, "zeros:n=4000,first=1")
    data = order(hr.stream(url, index=index)).map(number_of)
    # the fault is that of each range's first request: ranges must not be joined to others the first time only
    fetch = hr.Fetch(cache_dir=tmp_path if cached else None, gap_bytes=0, hedge_share=0)
    assert outcomes(data, fetch=fetch) == ALL
    damaged = sum("zeros" in request.faults for request in server.log)
    assert damaged
    asked = [request.range for request in server.log]
    assert len(asked) <= 2 * len(set(asked))
    for _ in range(2 if cached else 0):
        assert outcomes(data, fetch=fetch) == ALL
        assert sum("zeros" in request.faults for request in server.log) == damaged


@IN_ORDERS
@pytest.mark.parametrize("crc", [False, True])
def test_a_shard_of_another_size_is_another_one(shards: list[str], order: Order, crc: bool) -> None:
    index = put_index(shards, crc=crc)
    memory.put(shards[2], asyncio.run(hr.read(shards[2])) + bytes(512))
    got = outcomes(order(hr.stream(shards, index=index)).map(number_of))
    errors = [one for one in got if isinstance(one, hr.errors.ObjectChangedError)]
    assert errors[0].url == shards[2]
    assert "indexed" in str(errors[0])
    assert (got[:8], got[-5:], len(got)) == (ALL[:8], ALL[20:], 13 + len(errors))


def etag_of(server: FaultServer, url: str) -> str:
    async def read() -> str:
        async with Reader(concurrency=1) as reader:
            return (await reader.read_into(url, 0, memoryview(bytearray(1)))).etag or ""

    return asyncio.run(read())


@pytest.mark.slow
@IN_ORDERS
def test_a_copy_with_another_version_is_fine_only_where_checksums_are_known(server: FaultServer, order: Order) -> None:
    url, _ = serve(server)
    etag = etag_of(server, url)
    assert etag
    for options in ({"crc": False, "etag": etag}, {"etag": '"older"'}):
        assert outcomes(order(hr.stream(url, index=put_index([url], **options))).map(number_of)) == ALL
    old = hr.stream(url, index=put_index([url], crc=False, etag='"older"'))
    assert isinstance(outcomes(order(old).map(number_of))[0], hr.errors.ObjectChangedError)


def with_late_block(server: FaultServer, fault: str) -> hr.Stream:
    """A stream whose index has a fault in the block of its shard."""
    url, _ = serve(server)
    index = index_of_archive(url, bytes(server.objects[url.rpartition("/")[2]]))
    block, other = index.pack(), bytes(4 * 2**20)
    first = Entry(name="memory://other/0.tar", samples=1, length=len(other), check=zlib.crc32(other))
    data = pack_directory([first, Entry.of(url, index, block)]) + other + block
    place = server.add(f"{uuid.uuid4().hex}.hri", data, f"{fault},range={len(data) - len(block)}-")
    return hr.stream(url, index=place)


async def got_by_number(data: Any) -> list[Any]:
    return await asyncio.gather(*(data.aget(n) for n in ALL), return_exceptions=True)


@pytest.mark.parametrize("checked", [True, False])
def test_an_index_that_headers_contradict_is_an_error(checked: bool) -> None:
    url = f"memory://{uuid.uuid4().hex}/a.tar"
    memory.put(url, archive := tar(numbered_samples(0, TOTAL)))
    index = index_of_archive(url, archive, crc=checked)
    exchanged = replace(index, rows=replace(index.rows, fields=index.rows.fields[::-1]))
    memory.put(url + ".hri", index_file([(url, exchanged)]))
    data = hr.stream(url, index=url + ".hri")
    each = asyncio.run(got_by_number(data))
    for got in (outcomes(data), outcomes(by_number(data)), outcomes(data.shuffle("window")), each):
        assert [type(one) for one in got] == [hr.errors.ObjectChangedError] * TOTAL
        assert all("was indexed: in front of '0000" in str(one) and one.key is not None for one in got)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stall:s=60", "hang:s=60"])
@pytest.mark.parametrize("order", ALL_ORDERS.values(), ids=ALL_ORDERS)
def test_a_loader_can_be_closed_while_an_index_is_read(server: FaultServer, order: Order, fault: str) -> None:
    with hr.DataLoader(order(with_late_block(server, fault)), batch_size=4) as loader:
        batches = iter(loader)
        assert server.wait_until_stalled()
    with pytest.raises(hr.errors.LoaderClosedError):
        next(batches)
    assert server.wait_until_no_connection()


def test_a_call_that_waits_for_an_index_can_be_cancelled(server: FaultServer) -> None:
    data = with_late_block(server, "hang:s=60")

    async def main() -> None:
        tasks = [asyncio.create_task(data.aget(n)) for n in range(3)]
        assert await asyncio.to_thread(server.wait_until_stalled)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert server.wait_until_no_connection()


@pytest.mark.parametrize("order", ORDERS)
def test_an_index_block_that_fails_is_an_error_of_each_sample(server: FaultServer, order: str) -> None:
    errors = outcomes(ORDERS[order](with_late_block(server, "status:code=403")))
    assert [type(error) for error in errors] == [hr.errors.AccessDeniedError] * TOTAL
    for k, error in enumerate(errors):
        notes = [note for note in getattr(error, "__notes__", []) if "of the epoch" in note]
        assert len(notes) <= 1
        assert order == "in order" or f"sample {k} " in notes[0]
