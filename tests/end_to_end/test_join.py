"""Streams joined by keys: which samples come, in which order, and what is read for that."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders import parquet
from builders.loops import flat, given, iterated_later, rest_of, state_after
from builders.numbers import Named
from builders.tars import put_index, put_shards

import headrace as hr
from headrace.fetch.stores import memory

COUNTS = (9, 0, 17)


@pytest.fixture(scope="module")
def images() -> hr.Stream:
    urls = put_shards("joined-images", COUNTS)
    return hr.stream(urls, index=put_index(urls, "joined-images"))


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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_pairs_are_the_same_for_any_workers_ranks_and_loops(images: hr.Stream, table: hr.Stream, workers: int) -> None:
    data = images.join(table, on=ON).shuffle().map(pair)
    alone = given(data, 3, num_workers=workers)
    assert sorted(flat(alone)) == WANTED
    ranks = [given(data, 1, ranks=hr.Ranks(rank=rank, world_size=3), num_workers=workers) for rank in range(3)]
    assert [sorted(one + two + three) for one, two, three in zip(*ranks, strict=True)] == [
        sorted(batch) for batch in alone
    ]

    assert iterated_later(data) == list(data)


def test_state_of_a_join_is_refused_where_pairs_are_others(images: hr.Stream, table: hr.Stream) -> None:
    def loader(table: hr.Stream) -> hr.DataLoader[Any]:
        return hr.DataLoader(images.join(table, on=ON).map(pair), batch_size=3, collate_fn=list)

    with pytest.raises(hr.StateMismatchError):
        rest_of(loader(table.skip(3)), state_after(loader(table), 2))


def test_inputs_may_be_cut_and_have_steps(images: hr.Stream, table: hr.Stream) -> None:
    left, right = images.slice(2, 20).map(dict), table.skip(5).map(lambda row: {**row, "n": -row["n"]})
    data = left.join(right, on=ON)
    assert [pair(both) for both in data] == [(n, -n) for n in (3, 6, 9, 12, 15)]


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


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda a, b: a.shuffle().join(b, "id"), r"input 0 of \.join\(\) has \.shuffle\(auto\)"),
        (lambda a, b: a.join(b.repeat(2), "id"), r"input 1 of \.join\(\) has \.repeat\(2\)"),
        (lambda a, b: a.join(b.sample([0]), "id"), r"input 1 of \.join\(\) has \.sample"),
        (lambda a, b: a.join(b.filter(bool), "id"), r"filter\(bool\) of input 1 of \.join\(\)"),
        (lambda a, b: a.batch(2).join(b, "id"), r"batch\(\) of input 0 of \.join\(\): .*single samples"),
        (lambda a, b: a.join(b, 3), r"on=3 must be the name of a field"),
        (lambda a, b: a.join(hr.from_iterable([1]), "id"), r"input 1 of \.join\(\): samples have no numbers"),
        (lambda a, b: a.join({1: 1}, "id"), r"input 1 of \.join\(\) is a dict"),
        (lambda a, b: len(a.join(b.take(1), ("id", "other"))), r"no key of input 0 is one of input 1; .* 1, 2 and '1'"),
        (lambda a, b: len(b.join(b, "other")), r"two samples of input 1 have the key '1'"),
        (lambda a, b: len(a.join(b, "list")), r"a sample has a list there"),
        (
            lambda a, b: [*a.map(lambda sample: {"id": sample["id"] * 10}).join(b, "id")],
            r"the key is 10 on one side and 1 on the other: keys are those of the source, before \.map",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(make: Any, match: str) -> None:
    data = hr.from_map([{"id": 1, "other": "1", "list": []}, {"id": 2, "other": "1", "list": []}])
    with pytest.raises(hr.OptionError, match=match):
        make(data.map(dict), data.map(dict))
