"""Streams of several inputs and branches: real shards, any workers and ranks, joined by keys, resumed anywhere."""

import asyncio
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders import parquet
from builders.loops import assert_refused, flat, loaded, rest_of, state_after
from builders.numbers import Made, Named, Words
from builders.tars import put_index, put_indexed

import headrace as hr
from headrace.fetch.stores import memory
from headrace.ops.combined import CombinedShards
from headrace.pipeline.epoch_orders import Planning

LEFT, RIGHT = (30, 17, 0, 40, 3), (9, 20)


@pytest.fixture(scope="module")
def left() -> hr.Stream:
    return put_indexed("inputs-left", LEFT)


@pytest.fixture(scope="module")
def right() -> hr.Stream:
    return put_indexed("inputs-right", RIGHT)


@pytest.fixture(scope="module")
def rows() -> hr.Stream:
    for k in range(2):
        samples = [{"n": 1000 + 25 * k + n, "text": "row"} for n in range(25)]
        memory.put(f"memory://inputs/{k}.parquet", parquet.written(samples, row_group_size=7))
    return hr.stream([f"memory://inputs/{k}.parquet" for k in range(2)])


def number(sample: Any) -> Any:
    if isinstance(sample, dict):
        return int(sample["cls"]) if "cls" in sample else sample["n"]
    return tuple(map(number, sample)) if isinstance(sample, tuple) else sample


def with_noise(sample: Any) -> tuple[Any, float]:
    return sample, float(hr.rng().random())


async def async_number(sample: Any) -> Any:
    return number(sample)


def samples_of(data: Any, epoch: int = 0, **options: Any) -> list[Any]:
    with hr.DataLoader(data, batch_size=12, seed=3, collate_fn=list, **options) as loader:
        loader.set_epoch(epoch)
        return flat(loader)


def put_worker_number(worker: int) -> None:
    os.environ["HEADRACE_TEST_WORKER"] = str(worker)


def in_worker(n: int) -> tuple[int, int, int]:
    return n, os.getpid(), int(os.environ["HEADRACE_TEST_WORKER"])


def is_odd(sample: tuple[int, int, int]) -> bool:
    return sample[0] % 2 == 1


def test_inputs_without_numbers_run_in_the_initialized_workers_of_the_loader() -> None:
    first, *others = [hr.from_map(range(k, k + 100)).map(in_worker).filter(is_odd) for k in (0, 1000, 2000)]
    with hr.DataLoader(
        first.interleave(*others), batch_size=None, num_workers=2, worker_init_fn=put_worker_number
    ) as loader:
        for _ in range(2):  # epochs
            samples = list(loader)
            assert sorted(n for n, _, _ in samples) == [n for k in (0, 1000, 2000) for n in range(k + 1, k + 100, 2)]
            assert len({process for _, process, _ in samples}) <= 2
            assert {number for _, _, number in samples} <= {0, 1}


def is_kept(n: int) -> bool:
    return n % 3 != 0


def as_large(n: int) -> np.ndarray[Any, Any]:
    return np.full(100_000, n, np.float32)


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "process"), (2, "process"), (2, "thread")])
def test_inputs_that_nobody_waits_for_keep_no_worker_from_the_others(workers: int, kind: Any) -> None:
    numbered = [hr.from_map(range(k, k + 20)).map(as_large) for k in (0, 100, 200)]
    data = numbered[0].interleave(*numbered[1:], hr.from_map(range(300, 330)).filter(is_kept).map(as_large))
    with hr.DataLoader(
        data, batch_size=4, num_workers=workers, workers=kind, memory_budget="4MB", timeout=60
    ) as loader:
        numbers = [int(n) for batch in loader for n in batch[:, 0]]
    assert sorted(numbers) == [*(n for k in (0, 100, 200) for n in range(k, k + 20)), *filter(is_kept, range(300, 330))]


class Batched(Made):
    """Samples by many keys at once. The key 7 fails."""

    async def aget_many(self, keys: Any) -> list[Any]:
        return [await self.aget(key) for key in keys]

    async def aget(self, key: Any) -> Any:
        if key == 7:
            raise ValueError("seven")
        return key


def test_failing_key_of_an_input_fails_alone() -> None:
    data = hr.Stream(Batched(int, 20)).interleave(hr.from_map(range(100, 130)).filter(is_kept))
    with hr.DataLoader(data, batch_size=None, errors=hr.Skip()) as loader:
        assert sorted(loader) == [*(n for n in range(20) if n != 7), *filter(is_kept, range(100, 130))]
        assert loader.stats().skipped == 1


@pytest.mark.parametrize("rank", range(2))
def test_ranks_share_the_batches_of_an_input(rank: int) -> None:
    both = hr.from_map(range(12)).batch(3).concat(hr.from_map(range(100, 106)).batch(3))
    ranks = [hr.Ranks(rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
    mine, other = [flat(batch.tolist() for batch in loaded(both, batch_size=None, ranks=one)) for one in ranks]
    assert sorted(mine + other) == [*range(12), *range(100, 106)]
    assert len((mine, other)[rank]) == 9


def test_inputs_that_are_shards_are_read_in_ranges(left: hr.Stream, right: hr.Stream, rows: hr.Stream) -> None:
    whole, turns = left.concat(right, rows).shuffle(), left.shuffle().interleave(right, rows.shuffle(), block=4)
    assert isinstance(whole.source, CombinedShards)
    assert isinstance(turns.source, CombinedShards)
    with hr.DataLoader(left.shuffle().concat(right.shuffle()), batch_size=12) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == sum(LEFT + RIGHT)
        assert loader.stats().fetch.requests <= len(LEFT) + len(RIGHT) + 2  # and the two indexes


@pytest.mark.slow
def test_concat_is_one_stream_of_all_shards_when_it_is_shuffled(left: hr.Stream, right: hr.Stream) -> None:
    urls = [*left.source.urls, *right.source.urls]
    one, both = hr.stream(urls, index=put_index(urls, "inputs-both")), left.concat(right)
    operations: list[Callable[[Any], Any]] = [
        *(lambda data, by=by: data.shuffle(by) for by in ("auto", "shards", "within", "global")),
        lambda data: data.shuffle("window", window=20),
        lambda data: data.slice(10, 100, 3),
        lambda data: data.shuffle().take(70).repeat(2),
    ]
    for operate in operations:
        for epoch in (0, 2):
            assert samples_of(operate(both), epoch) == samples_of(operate(one), epoch)
    assert list(both.keys()) == list(one.keys())
    assert [both[k] for k in (0, 95, -1)] == [one[k] for k in (0, 95, -1)]
    with pytest.raises(IndexError):
        both[len(one)]
    with pytest.raises(TypeError, match="shuffle or draw what comes of them"):
        Words().shuffle().concat(right)[0]


def test_concat_of_row_groups_reads_each_about_once_when_it_is_shuffled(rows: hr.Stream) -> None:
    def requests(data: hr.Stream) -> int:
        with hr.DataLoader(data.select("n"), batch_size=None, fetch=hr.Fetch(gap_bytes=0)) as loader:
            assert sum(1 for _ in loader) == 50
            return loader.stats().fetch.requests

    first, second = (hr.stream(url) for url in rows.source.urls)
    assert requests(first.concat(second).shuffle(window=10)) <= requests(rows.shuffle(window=10)) + 1


def test_filter_by_keys_before_concat_leaves_those_samples_out(left: hr.Stream, right: hr.Stream) -> None:
    even = left.filter(lambda key: int(key) % 2 == 0, field="__key__")
    wanted = [*range(0, 90, 2), *range(29)]
    data = even.concat(right)
    assert samples_of(data.map(number)) == wanted
    assert sorted(samples_of(data.shuffle("global").map(number))) == sorted(wanted)
    assert samples_of(data.filter(lambda key: key == "000004", field="__key__").map(number)) == [4, 4]
    assert sorted(samples_of(data.shuffle().map(number))) == sorted(wanted)


OTHERS: list[tuple[str, Callable[..., hr.Stream]]] = [  # what differs from left.shuffle().interleave(right, block=4)
    ("data", lambda left, right, rows: right.interleave(left.shuffle(), block=4)),
    ("data", lambda left, right, rows: left.shuffle().interleave(rows, block=4)),
    ("order", lambda left, right, rows: left.shuffle().interleave(right, block=5)),
    ("order", lambda left, right, rows: left.shuffle().concat(right)),
    ("order", lambda left, right, rows: left.interleave(right, block=4)),
    ("order", lambda left, right, rows: left.shuffle().zip(right, strict=False)),
    ("order", lambda left, right, rows: left.shuffle().interleave(right.shuffle(), block=4)),
]


def test_state_is_refused_when_the_inputs_are_others(left: hr.Stream, right: hr.Stream, rows: hr.Stream) -> None:
    made = left.shuffle().interleave(right, block=4)
    state = state_after(hr.DataLoader(made, batch_size=4, collate_fn=list), 1)
    for field, make in OTHERS:
        other = make(left, right, rows)
        assert_refused(
            hr.DataLoader(other, batch_size=4),
            {**state, "fingerprint": {**state["fingerprint"], "count": len(other)}},
            field=field,
        )


def test_samples_keep_the_source_that_a_mixture_has_named(left: hr.Stream, right: hr.Stream) -> None:
    mixed = hr.mix({"left": left, "right": right})
    for data in (mixed.concat(right), right.map(dict).interleave(mixed)):
        samples = samples_of(data)
        assert Counter(sample.get("__source__") for sample in samples) == {"left": 90, "right": 29, None: 29}
    renamed = samples_of(hr.mix({"all": left.concat(right.map(dict))}))
    assert {sample["__source__"] for sample in renamed} == {"all"}


def test_zip_gives_pairs_by_number_in_other_orders_and_of_mixtures(
    left: hr.Stream, right: hr.Stream, rows: hr.Stream
) -> None:
    data = left.take(50).map(number).zip(rows.slice(3, 40, 2).map(number), strict=False)
    wanted = list(zip(range(50), range(1003, 1040, 2), strict=False))
    assert samples_of(data) == wanted
    assert len(data) == len(wanted)
    assert [data[k] for k in (0, 7, -1)] == [wanted[k] for k in (0, 7, -1)]
    shuffled, few = rows.shuffle(seed=5).map(number), right.take(3).repeat().map(number)
    wanted = list(zip(samples_of(shuffled), [0, 1, 2] * 20, strict=False))
    assert samples_of(shuffled.zip(few, strict=False)) == wanted
    mixture = hr.mix({"a": right.shuffle(seed=1), "b": rows.shuffle(seed=2)}, {"a": 1, "b": 1}).map(number)
    mixed = samples_of(mixture.zip(rows.map(number), strict=False))
    assert len({left for left, _ in mixed}) == len(mixed)
    assert [right for _, right in mixed] == [*range(1000, 1000 + len(mixed))]


def test_zip_gives_the_bytes_that_belong_together_when_it_is_shuffled(left: hr.Stream) -> None:
    again = hr.stream(left.source.urls, index=put_index(left.source.urls, "inputs-again"))
    samples = samples_of(left.zip(again).shuffle())
    assert len(samples) == sum(LEFT)
    assert all(one == other for one, other in samples)
    assert [int(one["cls"]) for one, _ in samples] != [*range(sum(LEFT))]


def test_zip_refuses_inputs_of_other_lengths_by_their_names(left: hr.Stream, right: hr.Stream) -> None:
    has = r"input {} of \.zip\(\) has {}"
    for data, match in (
        (left.zip(right), f"{has.format(1, '29 samples')}, and {has.format(0, '90 samples')}"),
        (right.zip(right, left.repeat()), f"{has.format(0, '29 samples')}, and {has.format(2, 'no end')}"),
    ):
        for use in (len, lambda data: loaded(data)):
            with pytest.raises(hr.OptionError, match=match):
                use(data)


@pytest.mark.slow
def test_inputs_of_a_zip_share_no_random_numbers(warm_server: None) -> None:
    async def noisy(sample: Any) -> tuple[Any, float]:
        return with_noise(sample)

    plain, on_loop = Words().map(with_noise), Words().map(noisy)
    for data in (plain.zip(plain), on_loop.zip(on_loop).zip(on_loop.zip(on_loop)), plain.zip(on_loop).zip(plain)):
        runs = [samples_of(data, num_workers=workers) for workers in (0, 2)]
        assert runs[0] == runs[1]
        drawn = [part for sample in runs[0] for part in _floats(sample)]
        assert len(set(drawn)) == len(drawn) >= 2 * 25


def _floats(sample: Any) -> list[float]:
    if isinstance(sample, tuple):
        return [found for part in sample for found in _floats(part)]
    return [sample] if isinstance(sample, float) else []


class Failing(Words):
    cancelled = 0

    async def aget(self, key: str) -> str:
        try:
            await asyncio.sleep(0 if key == "word-3" else 3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise ConnectionError(key)


def test_zip_raises_the_error_of_the_first_input_that_fails_and_cancels_the_others() -> None:
    class Broken(Words):
        async def aget(self, key: str) -> str:
            raise LookupError(key)

    late = Failing()
    with pytest.raises(LookupError) as caught:
        loaded(Broken().slice(3, 4).zip(late.slice(4, 5), Failing().slice(3, 4)), batch_size=None)
    assert any("input 0 of .zip(), key 'word-3'" in note for note in caught.value.__notes__)
    assert late.cancelled == 1


def test_zip_refuses_more_orders_than_can_be_numbered() -> None:
    many = Made(int, 10**8)
    assert len(many.zip(many, many, many, many.shuffle()).shuffle()) == 10**8
    with pytest.raises(hr.OptionError, match=r"\.zip\(…\)\.shuffle\(\)"):
        loaded(many.shuffle().zip(many.shuffle(), many.shuffle()))


def test_shards_of_two_inputs_are_distinguished(right: hr.Stream) -> None:
    data = right.take(5).map(number).concat(right.map(lambda sample: -number(sample)), right.slice(3, 5).map(number))
    assert samples_of(data) == [*range(5), *(-n for n in range(29)), 3, 4]
    plain = right.take(5).concat(right).map(number)
    assert samples_of(plain) == [*range(5), *range(29)]


def test_error_names_the_input_when_one_of_its_steps_fails(left: hr.Stream) -> None:
    def fails(sample: Any) -> Any:
        raise LookupError(sample)

    for bad in (Words().take(1).map(fails), Words().take(1).map(async_number).map(fails)):
        with hr.DataLoader(left.concat(bad), batch_size=None) as loader, pytest.raises(LookupError) as caught:
            list(loader)
        assert any("input 1 of .concat()" in note for note in caught.value.__notes__)


def test_plan_knows_when_each_sample_has_come_where_there_is_no_end(right: hr.Stream) -> None:
    made = {54: Words().concat(right.repeat()), 58: Words().repeat().interleave(right.repeat())}
    for count, data in made.items():
        assert Planning(data.pipeline(), 0).pass_count == count
        assert set(samples_of(data.map(number).take(count))) == {*list(Words()), *range(29)}


TREE = """\
FromMap(…).map(str.upper).concat(mix(x, y), FromMap(…).take(1))
  samples: 7
  ├─ 0: FromMap(…)
  │    samples: 2
  │    .map(str.upper)  [workers]
  ├─ 1: mix(x, y)
  │    samples: 4
  │    ├─ x: FromMap(…)
  │    │    samples: 2
  │    └─ y: FromMap(…)
  │         samples: 2
  │         .shuffle(auto)  [plan]
  └─ 2: FromMap(…)
       samples: 2
       .take(1)  [plan]"""


def test_inputs_are_described_as_a_tree() -> None:
    words = hr.from_map(["a", "b"])
    data = words.map(str.upper).concat(hr.mix({"x": words, "y": words.shuffle()}), words.take(1))
    assert data.describe() == TREE


COUNTS = (9, 0, 17)


@pytest.fixture(scope="module")
def images() -> hr.Stream:
    return put_indexed("joined-images", COUNTS)


@pytest.fixture(scope="module")
def table() -> hr.Stream:
    schema = pa.schema({"name": pa.string(), "n": pa.int64(), "text": pa.string()})
    rows = [{"name": f"{n:06}", "n": n, "text": f"text {n}"} for n in range(30, -1, -3)]
    memory.put("memory://joined/rows.parquet", parquet.written(rows, schema, row_group_size=4))
    return hr.stream("memory://joined/rows.parquet")


def pair(both: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, int]:
    return int(both[0]["cls"]), int(both[1]["n"])


ON, WANTED = ("__key__", "name"), [(n, n) for n in range(0, sum(COUNTS), 3)]


def test_pairs_come_in_the_order_of_the_left_stream(images: hr.Stream, table: hr.Stream) -> None:
    assert [sample["__key__"] for sample in images.take(2)] == ["000000", "000001"]
    assert list(images.join(table, on=ON).map(pair)) == WANTED
    back = table.join(images, on=("name", "__key__")).map(lambda both: (both[0]["n"], int(both[1]["cls"])))
    assert list(back) == [(n, n) for n in range(24, -1, -3)]
    assert len(back) == len(WANTED)
    assert back[0] == (24, 24)


def test_state_of_a_join_is_refused_where_pairs_are_others(images: hr.Stream, table: hr.Stream) -> None:
    def loader(table: hr.Stream) -> hr.DataLoader[Any]:
        return hr.DataLoader(images.join(table, on=ON).map(pair), batch_size=3, collate_fn=list)

    with pytest.raises(hr.StateMismatchError):
        rest_of(loader(table.skip(3)), state_after(loader(table), 2))


def test_left_keys_may_come_several_times_and_none_is_no_key() -> None:
    left = hr.from_map([{"id": key} for key in (2, None, 1, 2, float("nan"), 9, np.int64(1))])
    right = hr.from_map([{"id": key, "v": v} for v, key in enumerate((1, None, 2, None))])
    assert [(both[0]["id"], both[1]["v"]) for both in left.join(right, on="id")] == [(2, 2), (1, 0), (2, 2), (1, 0)]


def test_join_reads_keys_only_and_each_pair_once() -> None:
    left, right = Named("abcdef", str.upper), Named("xfcb", str.upper)
    data = left.join(right, on="__key__")
    assert len(data) == 3
    assert left.asked == right.asked == []
    assert list(data) == [("B", "B"), ("C", "C"), ("F", "F")]
    assert left.asked == right.asked == ["b", "c", "f"]
    assert ".join" in data.describe()


def ids(keys: str) -> hr.Stream:
    return hr.from_map([{"id": key, "__key__": key} for key in keys])


@pytest.mark.slow
@pytest.mark.parametrize("on", ["id", "__key__"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ids("abc").interleave(ids("de")),
        lambda: ids("abc").interleave(ids("de")).slice(1, 4),
        lambda: ids("ab").concat(ids("c"), ids("de")),
        lambda: ids("edcba").cache(),
        lambda: hr.from_map("abcde").map(lambda key: {"id": key, "__key__": key}).cache().map(dict),
    ],
)
def test_keys_belong_to_their_samples_however_these_are_numbered(make: Any, on: str) -> None:
    other = ids("dbeca")
    assert [(a["id"], b["id"]) for a, b in make().join(other, on=on)] == [(one["id"], one["id"]) for one in make()]
    have = {one["id"] for one in make()}
    assert [(a["id"], b["id"]) for a, b in other.join(make(), on=on)] == [(key, key) for key in "dbeca" if key in have]


def test_names_of_kept_shards_are_what_they_are_joined_by(images: hr.Stream) -> None:
    left, right = images.skip(3).cache(), images.slice(1, 26, 2).cache()
    assert [a["__key__"] for a, _ in left.join(right, on="__key__")] == [f"{n:06}" for n in range(3, sum(COUNTS), 2)]
    assert all(a["__key__"] == b["__key__"] for a, b in left.join(right, on="__key__"))


@pytest.mark.parametrize(
    ("on", "other", "error", "why"),
    [
        ("id", [(1, 2)], TypeError, "the sample is a tuple, whose fields have no names: 'id'"),
        ("name", [{"id": "a"}], hr.errors.FormatError, "no field 'name'"),
    ],
)
def test_error_of_keys_names_the_input_that_was_asked(on: str, other: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        list(ids("ab").join(hr.from_map(other), on=("id", on)))
    assert f".join(on='{on}') has asked input 1 for its keys" in caught.value.__notes__


def test_keys_are_those_of_the_source_or_of_the_step_that_makes_them() -> None:
    left, right = hr.from_map([{"id": 1}, {"id": 2}]), hr.from_map([{"id": 2, "v": 4}])
    assert [(a, b["v"]) for a, b in left.map(lambda sample: sample["id"]).join(right, "id")] == [(2, 4)]
    assert [(a["id"], b["v"]) for a, b in left.map(str, field="id").join(right, "id")] == [("2", 4)]
    data = hr.from_map([{"id": n} for n in (1, 5, 2)])
    made = hr.from_map(range(3)).map(lambda n: {"number": n})
    doubled = data.map(lambda sample: {"number": 2 * sample["id"]})
    assert [(a["number"], b["id"]) for a, b in doubled.join(data, on=("number", "id"))] == [(2, 2)]
    assert [(a["id"], b["number"]) for a, b in data.join(made, on=("id", "number"))] == [(1, 1), (2, 2)]


def changeable(key: int) -> dict[str, Any]:
    return {"n": key, "list": [key], "array": np.full(2, key)}


def counted(count: int) -> Made:
    """Samples that can be changed in place. `asked` has the requested ones."""
    return Made(changeable, count)


def changed(sample: dict[str, Any]) -> dict[str, Any]:
    sample["n"] += 100
    sample["list"].append(1)
    sample["array"] += 1
    return sample


async def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "slow": True}


def plain(pair: tuple[dict[str, Any], ...]) -> list[Any]:
    return [{name: np.asarray(value).tolist() for name, value in sample.items()} for sample in pair]


def drawn(sample: dict[str, Any]) -> float:
    return float(hr.rng().random())


@pytest.mark.parametrize("workers", [0, 2])
def test_branches_that_are_zipped_get_each_sample_once(workers: int) -> None:
    data = counted(9)
    first, second = data.shuffle().fork(2)
    pairs = first.map(changed).zip(second.map(slowly)).map(plain)
    got = loaded(pairs, batch_size=None, num_workers=workers, collate_fn=list)
    assert sorted(data.asked) == list(range(9))
    assert sorted(second["n"] for _, second in got) == list(range(9))
    for one, other in got:
        n = other["n"]
        assert other == {"n": n, "list": [n], "array": [n, n], "slow": True}
        assert one == {"n": n + 100, "list": [n, 1], "array": [n + 1, n + 1]}


def test_later_branches_do_not_see_what_earlier_ones_change() -> None:
    branches = counted(2).fork(3)
    pairs = branches[0].map(changed).zip(branches[1], branches[2].map(changed)).map(plain)
    assert [sample["n"] for sample in next(iter(pairs))] == [100, 0, 100]
    assert pairs[1][1] == {"n": 1, "list": [1], "array": [1, 1]}
    first, second = counted(3).fork(2)
    third, fourth = second.map(slowly).fork(2)  # a fork within a branch
    inner = third.map(drawn).zip(fourth.map(lambda sample: sample["slow"]))
    got = list(first.map(lambda sample: sample["n"]).zip(inner))
    assert [(n, pair[1]) for n, pair in got] == [(0, True), (1, True), (2, True)]


def test_branches_draw_random_numbers_of_their_own() -> None:
    first, second = counted(50).fork(2)
    pairs = list(first.map(drawn).zip(second.map(drawn)))
    assert all(one != other for one, other in pairs)
    assert pairs == list(first.map(drawn).zip(second.map(drawn)))


def test_branches_of_samples_without_numbers_stay_together() -> None:
    first, second = hr.from_iterable(lambda: iter(range(10))).filter(lambda n: n % 2).fork(2)
    assert list(first.map(str).zip(second)) == [(str(n), n) for n in range(1, 10, 2)]
    first, second = hr.from_map(range(5)).batch(2).fork(2)
    assert list(first.map(sum).zip(second.map(len))) == [(1, 2), (5, 2), (4, 1)]


def test_branch_by_itself_is_the_stream() -> None:
    first, second = hr.from_map(range(5)).shuffle(seed=1).fork(2)
    assert list(first) == list(second) == list(hr.from_map(range(5)).shuffle(seed=1))
    assert ".fork(2)[1]  [plan]" in second.describe()
    assert next(iter(first.map(str).zip(hr.from_map("abcde")))) == (str(next(iter(first))), "a")
    text = first.map(str).zip(second.map(abs)).describe()
    assert all(line in text for line in ("fork(2)  [w", ".map(str) of branch 0  [w", ".map(abs) of branch 1  [w"))
    first, second = (pickle.loads(pickle.dumps(branch)) for branch in counted(3).fork(2))
    assert [pair[0]["n"] for pair in first.zip(second)] == [0, 1, 2]
    assert first.source.asked == [0, 1, 2]
    assert second.source.asked == []


def test_error_of_a_branch_names_it() -> None:
    first, second = hr.from_map([1, 0]).fork(2)
    with pytest.raises(ZeroDivisionError) as caught:
        list(first.zip(second.map(lambda n: 1 // n)))
    assert any("of branch 1" in note for note in caught.value.__notes__)
    first, second = hr.from_map([threading.Lock()]).fork(2)
    with pytest.raises(TypeError) as refused:
        list(first.zip(second))
    assert any("cannot be copied for each branch" in note for note in refused.value.__notes__)


FIVE = hr.from_map(range(5))
ONE, TWO = (
    hr.from_map([{"id": 1, "other": "1", "list": []}, {"id": 2, "other": "1", "list": []}]).map(dict) for _ in range(2)
)
FIRST, SECOND = hr.from_map([1, 2]).fork(2)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    # streams of several inputs
    (lambda: FIVE.concat({1: 2}), "input 1 of .concat..={1: 2} must be a stream, or a data set with"),
    (lambda: FIVE.filter(bool).concat(FIVE.prefetch(2)), r"concat\(\) cannot follow \.prefetch\(2\) of input 1"),
    (lambda: FIVE.concat(FIVE.map(number).map(async_number)), "`async def` functions before"),
    (lambda: FIVE.repeat().concat(FIVE), "input 0 of .concat.. has no end"),
    (lambda: FIVE.interleave(FIVE.repeat()).repeat(2), "no end; bound it"),
    (lambda: FIVE.interleave(FIVE, block=0), "block=0 must be a whole number, 1 or more"),
    (lambda: FIVE.interleave(FIVE).shuffle("shards"), "by='shards' must be 'window' for samples that"),
    (lambda: FIVE.repeat().zip(FIVE.repeat()).slice(3), "no end; bound it"),
    # streams that are joined
    (lambda: ONE.shuffle().join(TWO, "id"), r"\.join\(\) cannot follow \.shuffle\(auto\) of input 0"),
    (lambda: ONE.join(TWO.repeat(2), "id"), r"\.join\(\) cannot follow \.repeat\(2\) of input 1"),
    (lambda: ONE.join(TWO.sample([0]), "id"), r"\.join\(\) cannot follow \.sample\(…\) of input 1"),
    (lambda: ONE.join(TWO.filter(bool), "id"), r"filter\(bool\) of input 1 of \.join\(\)"),
    (lambda: ONE.batch(2).join(TWO, "id"), r"batch\(\) of input 0 of \.join\(\): .*single samples"),
    (lambda: ONE.join(TWO, 3), r"on=3 must be the name of a field"),
    (lambda: ONE.join(hr.from_iterable([1]), "id"), r"input 1 of \.join\(\): samples have no numbers"),
    (lambda: ONE.join({1: 1}, "id"), r"input 1 of \.join\(\)={1: 1} must be a stream"),
    (lambda: len(ONE.join(TWO.take(1), ("id", "other"))), r"no key that both inputs have: .* 1, 2 and '1'"),
    (lambda: len(TWO.join(TWO, "other")), r"key other='1' must be unique in input 1"),
    (lambda: len(ONE.join(TWO, "list")), r"must be a number, a text or bytes"),
    (
        lambda: [*ONE.map(lambda sample: {"id": sample["id"] * 10}).join(TWO, "id")],
        r"has the key 10, and its partner has 1: keys are those of the source, before \.map",
    ),
    # branches that would read samples twice
    (lambda: FIRST.filter(bool).zip(SECOND), r"filter\(bool\) of branch 0"),
    (lambda: FIRST.zip(SECOND.shuffle()), r"shuffle\(auto\) of branch 1"),
    (lambda: FIRST.zip(SECOND.take(2)), r"take\(2\) of branch 1"),
    (lambda: FIRST.batch(2).zip(SECOND.batch(2)), r"batch\(2\) of branch 0"),
    (lambda: FIRST.zip(SECOND.flat_map(list)), r"flat_map\(list\) of branch 1"),
    (lambda: FIRST.zip(SECOND.enumerate()), r"enumerate\(\) of branch 1"),
    (lambda: FIRST.zip(SECOND, hr.from_map([1, 2])), r"\.zip\(\) cannot follow branches of one \.fork\(\) of inputs 0"),
    (lambda: FIRST.map(str).cache().zip(SECOND), r"cache\(\) of branch 0"),
    (lambda: FIRST.cache().concat(SECOND.cache()), r"\.concat\(\) cannot follow branches of one .* of inputs 0 and 1"),
    (lambda: FIRST.concat(SECOND), r"\.concat\(\) cannot follow branches of one .* of inputs 0 and 1"),
    (lambda: hr.mix({"a": FIRST, "b": SECOND}), "cannot follow branches of one .fork"),
    (lambda: FIRST.zip(*SECOND.map(str).fork(2)), r"\.zip\(\) cannot follow branches of one .* of inputs 1 and 2"),
    (lambda: FIRST.fork(0), "n=0 must be"),
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_inputs_that_cannot_be_combined_are_refused_with_a_remedy(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make()
