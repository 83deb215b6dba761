"""Page indexes of Parquet: pages that cannot hold are not read, and rows are those that pyarrow's filters give."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.loops import flat, loaded, rest_of, state_after
from builders.parquet import of_table, pages_table, varint
from builders.stored import ranges
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from one_object import OneObject
from unit.arrow_columns import KINDS, plain
from unit.parquet_reads import URL, indexed, put, rows_of

import headrace as hr
from headrace.formats.format import ShardEntry
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.parquet.footer import ColumnChunk, ThriftReader
from headrace.formats.parquet.format import Parquet
from headrace.formats.parquet.pages import PageBounds, PageIndex, page_bounds
from headrace.formats.parquet.where import asked_of, pages_left
from headrace.testing import FaultServer

ORDERED = ("=", "==", "!=", "<", "<=", ">", ">=")


@st.composite
def tables(draw: st.DrawFn, *, is_paged: bool) -> tuple[pa.Table, list[str]]:
    """A table with up to three columns of some kinds, and their names."""
    count = draw(st.integers(0, 120 if is_paged else 25))
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True))
    columns: dict[str, Any] = {}
    for name in names:
        kind, values = KINDS[name]
        cuts = sorted(draw(st.lists(st.integers(0, count), max_size=6)))
        some = [draw(st.sampled_from(values)) for _ in range(len(cuts) + 1)]
        stretched = [value for value, a, b in zip(some, [0, *cuts], [*cuts, count], strict=True) for _ in range(b - a)]
        is_shuffled = not is_paged and draw(st.booleans())
        columns[name] = pa.array(draw(st.permutations(stretched)) if is_shuffled else stretched, kind)
    columns["row"] = pa.array(range(count), pa.int64())
    if is_paged:
        dice = random.Random(draw(st.integers(0, 9)))
        columns["wide"] = pa.array([f"{k}" * dice.randrange(40) for k in range(count)])
        lists = [None if k % 7 == 3 else [k] * dice.randrange(9) for k in range(count)]
        columns["list"] = pa.array(lists, pa.list_(pa.int32()))
        structs = [[{"a": [k] * dice.randrange(3), "b": f"{k}"}] * dice.randrange(3) for k in range(count)]
        columns["deep"] = pa.array(structs, pa.list_(pa.struct({"a": pa.list_(pa.int16()), "b": pa.string()})))
    return pa.table(columns), names


@st.composite
def predicates(draw: st.DrawFn, names: Sequence[str]) -> list[list[tuple[str, str, Any]]]:
    def term() -> tuple[str, str, Any]:
        name = draw(st.sampled_from([*names, "row"]))
        values = [*range(120)] if name == "row" else [v for v in KINDS[name][1] if v is not None and v == v] or [3]
        if draw(st.booleans()):
            some = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
            return name, draw(st.sampled_from(["in", "not in"])), some
        return name, draw(st.sampled_from(("=", "!=") if name == "bool" else ORDERED)), draw(st.sampled_from(values))

    return [[term() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.parametrize("is_paged", [False, pytest.param(True, marks=pytest.mark.slow)])
@settings(max_examples=150)
@given(st.data())
def test_rows_equal_those_filtered_by_pyarrow(is_paged: bool, data: st.DataObject) -> None:
    table, names = data.draw(tables(is_paged=is_paged))
    where: Any = data.draw(predicates(names))
    where = where if data.draw(st.booleans()) else where[0]
    options: dict[str, Any] = {"row_group_size": data.draw(st.integers(1, 130 if is_paged else 9))}
    if is_paged:
        options |= {
            "write_page_index": data.draw(st.sampled_from([True, True, True, False])),
            "write_statistics": data.draw(st.sampled_from([True, True, True, ["row"], False])),
            "data_page_size": data.draw(st.sampled_from([30, 100, 300, 1000])),
            "write_batch_size": data.draw(st.sampled_from([1, 3, 10, 64])),
            "use_dictionary": data.draw(st.sampled_from([True, False, ["wide"]])),
            "data_page_version": data.draw(st.sampled_from(["1.0", "2.0"])),
            "compression": data.draw(st.sampled_from(["none", "zstd"])),
        }
    body = of_table(table, **options)
    assume(pq.read_table(io.BytesIO(body), columns=["row"]).num_rows == len(table))  # it is not always
    columns = data.draw(st.sampled_from([["row"], ["row", "list"], [*table.column_names]])) if is_paged else ["row"]
    form = Parquet(columns=columns, where=where)
    rows = indexed(form, body).rows
    got = rows_of(form, body, rows)
    # of the table, not of the file: by statistics pyarrow excludes rows of NaN, and zeros of another sign
    wanted = table.filter(pq.filters_to_expression(where)).select(columns)
    assert [one["row"] for one in got] == wanted["row"].to_pylist()
    for name in set(columns) & {"list", "deep", "wide"}:
        assert [plain(one[name]) for one in got] == wanted[name].to_pylist(), name
    assert {int(key) for key in rows.keys} >= set(wanted["row"].to_pylist()), "keys are the numbers of rows in the file"


OPTIONS: dict[str, Any] = {
    "row_group_size": 5000, "write_page_index": True, "data_page_size": 4096, "write_batch_size": 100,
    "compression": "none",
}  # fmt: skip
TABLE = pages_table(12_000)
SOME = [[("n", ">=", 4900), ("n", "<", 5300)], [("n", "in", [7777, 9999])]]
KEPT = [*range(4900, 5300), 7777, 9999]


@pytest.fixture(scope="module")
def body() -> bytes:
    return of_table(TABLE, use_dictionary=False, **OPTIONS)


@pytest.mark.process
def test_excluded_pages_are_not_read(body: bytes) -> None:
    with FaultServer() as server:
        data = hr.stream(server.add("0.parquet", body), format=hr.Parquet(columns=["text", "structs"], where=SOME))
        wanted = [(one["text"], one["structs"]) for one in TABLE.take(KEPT).to_pylist()]
        assert [(one["text"], one["structs"]) for one in data] == wanted
        columns = [place for place in ranges(server) if place[1] < len(body) - 64 * 1024]
        assert len(columns) <= 10, "of each group its pages of n, of the texts and of the structs"
        nbytes = sum(stop - start for start, stop in columns)
        assert nbytes < 0.17 * len(body), "of 12,000 rows the 1,600 of pages that may have some"


def test_page_index_needs_at_most_one_request(body: bytes) -> None:
    for data, requests in ((of_table(TABLE.select(["n", "list"]), use_dictionary=False, **OPTIONS), 1), (body, 2)):
        reads = OneObject(data)
        shard = anyio.run(Parquet(where=SOME).index, reads, ShardEntry(URL), DEFAULTS)
        assert len(shard.rows) == 1600
        assert reads.reads == requests


FEW = TABLE.slice(0, 1500)
WHERE = [[("n", ">=", 690), ("n", "<", 720)], [("n", "in", [1, 1201])]]
LEFT = [1, *range(690, 720), 1201]


@pytest.mark.slow
@pytest.mark.parametrize("by", [None, "window", "global"])
def test_filtered_rows_can_be_shuffled_divided_and_resumed(by: Any) -> None:
    url = put(FEW, row_group_size=700, write_page_index=True, data_page_size=200, write_batch_size=20)
    data = hr.stream(url, format=hr.Parquet(where=WHERE))
    data = data if by is None else data.shuffle(by, seed=1)
    got, wanted = list(data), {row["n"]: row for row in FEW.take(LEFT).to_pylist()}
    for one in got:
        assert {name: plain(one[name]) for name in FEW.column_names} == wanted[one["n"]]
        assert one["__key__"] == str(one["n"])
    numbers = data.select("n").map(lambda sample: sample["n"])
    options: Any = {"batch_size": 5, "collate_fn": list}
    every = flat(loaded(numbers, **options))
    assert sorted(every) == LEFT
    assert by or every == LEFT, "they are in the order of the file"
    state = state_after(hr.DataLoader(numbers, **options), 3)
    assert every[:15] + flat(rest_of(hr.DataLoader(numbers, **options), state)) == every
    shared = [
        flat(loaded(numbers.epoch(samples=30), **options, ranks=hr.Ranks(rank=rank, world_size=2))) for rank in range(2)
    ]
    assert len(flat(shared)) == 30
    assert set(flat(shared)) <= set(LEFT)


def chunk_of(data: bytes, group: int, column: int) -> Any:
    length = int.from_bytes(data[-8:-4], "little")
    groups: Any = ThriftReader(data[-8 - length : -8]).struct()[4]
    return groups[group][1][column]


def with_index(data: bytes, column: int, field: int, change: Callable[[Any], Any]) -> bytes:
    chunk = chunk_of(data, 0, column)
    at, size = chunk[field], chunk[field + 1]
    new = change(data[at : at + size])
    assert len(new) == size, "it has its place"
    return data[:at] + new + data[at + size :]


def moved(index: bytes) -> bytes:
    pages: Any = ThriftReader(index).struct()[1]
    row = next(page[3] for page in pages if page[3] >= 1200)
    return index.replace(varint(row) + b"\0", varint(row + 1) + b"\0", 1)  # the last field of a page, and its end


@pytest.mark.parametrize("field", [4, 6])
def test_damaged_page_index_excludes_no_rows(body: bytes, field: int) -> None:
    data = with_index(body, 0, field, lambda index: b"\xff" * len(index))
    where = [("n", ">=", 1000), ("n", "<", 1010)]
    assert [one["n"] for one in rows_of(Parquet(columns=["n"], where=where), data)] == list(range(1000, 1010))
    form = Parquet(where=where)
    assert len(indexed(form, data).rows) == 5000
    assert len(indexed(form, body).rows) == 600
    assert len(indexed(form, body, Limits(unpacked_free_bytes=100_000)).rows) == 600


@pytest.mark.parametrize("column", [0, 1, 2])
def test_page_index_that_moves_rows_is_an_error(body: bytes, column: int) -> None:
    where = [("n", ">=", 600), ("n", "<", 1200)]
    form = Parquet(columns=["n", TABLE.column_names[column]], where=where)
    assert [one["n"] for one in rows_of(form, body)] == list(range(600, 1200))
    with pytest.raises(ValueError, match=r"values|rows"):
        rows_of(form, with_index(body, column, 4, moved))


def test_truncated_bounds_exclude_no_matching_rows() -> None:
    data = of_table(pa.table({"text": ["x"]}), write_statistics=False)

    def left(op: str, value: Any, low: bytes | None, high: bytes | None) -> bool:
        form = Parquet(where=[("text", op, value)])
        asked = asked_of(form.where, indexed(form, data).kept[-1].columns)
        return pages_left(asked.questions[0][0], PageBounds((low,), (high,), (0,), (False,)))[0]

    long = "b" * 100
    assert left("=", long, b"bbb", b"bbc")
    assert left("!=", long, b"bbb", b"bbb")
    assert left("not in", [long], b"bbb", b"bbb")
    assert left(">", "bbb", b"bbb", b"bbc")
    assert not left(">", "bbc", b"bbb", b"bbc"), "no bound is too low"
    assert not left("<", "bbb", b"bbb", b"bbc")
    assert left("=", long, None, None)
    assert left("=", long, b"", b"\xff")


def test_page_without_a_maximum_may_have_any_value() -> None:
    chunk = ColumnChunk(0, 4, 4, 10, 10, (0, 0), (0, 0), (None, None, None))
    index = PageIndex((4, 8), (8, 14), (0, 2))
    packed = b"\x19\x22\x02\x02" + b"\x19\x28\x00\x01a" + b"\x19\x28\x00\x01b" + b"\x15\x02\x00"
    assert page_bounds(packed, chunk, index) == PageBounds((b"", b"a"), (None, b"b"), (None, None), (False, False))
    for damaged in (packed.replace(b"\x19\x22\x02\x02", b"\x19\x12\x02"), packed[:4] + b"\x00", packed[:-3]):
        with pytest.raises(ValueError, match=r"pages|cut off"):
            page_bounds(damaged, chunk, index)
    assert page_bounds(packed.replace(b"\x02\x02\x19", b"\x01\x02\x19", 1), chunk, index).are_missing == (True, False)
    missing = packed[:-1] + b"\x19\x26\x02\x04\x00"
    assert page_bounds(missing, chunk, index).missing == (1, 2)
    with pytest.raises(ValueError, match="miss other values"):
        page_bounds(missing, chunk._replace(statistics=(None, None, 4)), index)


def test_page_index_of_whole_groups_is_not_read(body: bytes) -> None:
    form = Parquet(where=[("n", ">=", 100)])
    shard = indexed(form, body)
    assert len(shard.rows) == 12_000
    assert [facts.total for facts in shard.rows.about] == [5000, 5000, 2000], "page 1 has rows under 100 and over it"
    assert [k for k in shard.kept if k >= 0] == [chunk_of(body, 0, 0)[3][9]], "by statistics the others are whole"
