"""Predicates on Parquet: rows are those that pyarrow's own filters give, and what cannot hold is not read."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.parquet import of_table
from one_object import OneObject

import headrace as hr
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, OptionError, StateMismatchError
from headrace.fetch.stores import memory
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import DEFAULTS
from headrace.formats.parquet.format import Parquet
from headrace.testing import FaultServer

NUMBERS = itertools.count()
DAY, TIME = dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, 3, 4, 5, 678)  # noqa: DTZ001
HOUR = dt.timedelta(hours=1)
ZONED = TIME.replace(microsecond=5000, tzinfo=dt.UTC)

VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int": (pa.int64(), [None, 0, 1, -5, 2**62, -(2**63)]),
    "int8": (pa.int8(), [None, -128, 0, 127]),
    "uint": (pa.uint64(), [None, 0, 7, 2**62]),
    "uint16": (pa.uint16(), [0, 7, 40_000]),
    "float": (pa.float64(), [None, math.nan, 0.0, 1.5, -math.inf, math.inf]),
    "single": (pa.float32(), [None, math.nan, 0.0, 1.5, -2.25]),
    "bool": (pa.bool_(), [None, True, False]),
    "text": (pa.string(), [None, "", "a", "ab", "ü", "b" * 200, "b" * 199 + "c"]),
    "large": (pa.large_string(), [None, "a", "b"]),
    "words": (pa.dictionary(pa.int32(), pa.string()), [None, "a", "b", "c"]),
    "bytes": (pa.binary(), [None, b"", b"\0", b"\xff", b"a\xff"]),
    "fixed": (pa.binary(2), [None, b"ab", b"\xff\0"]),
    "date": (pa.date32(), [None, DAY, dt.date(1969, 12, 31), dt.date(9999, 1, 1)]),
    "time": (pa.timestamp("us"), [None, TIME, TIME + HOUR, dt.datetime(1969, 1, 1)]),  # noqa: DTZ001
    "seconds": (pa.timestamp("ms", "UTC"), [None, ZONED, ZONED + HOUR]),
    "nano": (pa.timestamp("ns"), [None, TIME, TIME + HOUR]),
    "decimal": (pa.decimal128(9, 2), [None, Decimal("1.50"), Decimal("-3.25"), Decimal(0)]),
}
ORDERED = ("=", "==", "!=", "<", "<=", ">", ">=")


def drawn_table(dice: random.Random) -> pa.Table:
    count, columns = dice.randrange(25), {}
    for name in dice.sample(sorted(VALUES), dice.randint(1, 3)):
        kind, values = VALUES[name]
        some = dice.choices(values, k=3)
        plain = dice.choices(some, k=count)
        has_order = None not in plain and all(value == value for value in plain)
        columns[name] = pa.array(sorted(plain) if has_order and dice.random() < 0.5 else plain, kind)
    return pa.table({**columns, "row": pa.array(range(count), pa.int64())})


def drawn_term(dice: random.Random, names: Sequence[str]) -> tuple[str, str, Any]:
    name = dice.choice(names)
    values = [value for value in VALUES[name][1] if value is not None and value == value]
    if dice.random() < 0.5:
        return name, dice.choice(["in", "not in"]), dice.choices(values, k=dice.randint(1, 3))
    return name, dice.choice(("==", "!=") if name == "bool" else ORDERED), dice.choice(values)


def indexed(form: Parquet, data: bytes, url: str = "memory://where/0.parquet") -> Rows:
    try:
        form.index(OneObject(data), ShardEntry(url), DEFAULTS).send(None)
    except StopIteration as done:
        rows: Rows = done.value.rows
        return rows
    raise AssertionError("it waits for something")


def opened(form: Parquet, data: bytes, rows: Rows) -> list[Mapping[str, Any]]:
    assert rows.block is not None
    assert rows.row is not None
    blocks = []
    for block, about in enumerate(rows.about or ()):
        members = range(int(rows.starts[block]), int(rows.starts[block + 1]))
        names = tuple(rows.fields[int(rows.field[k])] for k in members)
        bodies = [data[int(rows.offset[k]) : int(rows.offset[k] + rows.size[k])] for k in members]
        blocks.append(form.open_block(Block("u", names, DEFAULTS, about), bodies))
    every = [blocks[block][row] for block, row in zip(rows.block.tolist(), rows.row.tolist(), strict=True)]
    return [one for one in every if one is not None]


@pytest.mark.parametrize("seed", range(150))
def test_rows_are_those_that_pyarrow_filters(seed: int) -> None:
    dice = random.Random(seed)
    table = drawn_table(dice)
    names = [name for name in table.column_names if name != "row"]
    some = [[drawn_term(dice, names) for _ in range(dice.randint(1, 3))] for _ in range(dice.randint(1, 3))]
    where = some if dice.random() < 0.5 else some[0]
    body = of_table(table, row_group_size=dice.randint(1, 9), use_dictionary=dice.random() < 0.5)
    form = Parquet(columns=["row"], where=where)
    rows = indexed(form, body)
    got = [one["row"] for one in opened(form, body, rows)]
    # of the table, not of the file: by statistics pyarrow leaves out rows of NaN, and zeros of another sign
    wanted = table.filter(pq.filters_to_expression(where))["row"].to_pylist()
    assert got == wanted
    assert {int(key) for key in rows.keys} >= set(wanted), "keys are the numbers of rows in the file"


@pytest.mark.parametrize(
    ("name", "term", "wanted"),
    [
        ("int", ("<", 0.5), [0, -5, -(2**63)]),
        ("int", ("<", 1.0), [0, -5, -(2**63)]),
        ("int", ("!=", 0.5), [0, 1, -5, 2**62, -(2**63)]),
        ("int", ("in", [0.5, 1.0]), [1]),
        ("int", (">", -math.inf), [0, 1, -5, 2**62, -(2**63)]),
        ("int8", ("<", 1000), [-128, 0, 127]),
        ("int8", (">", 1000), []),
        ("int8", ("not in", [1000]), [None, -128, 0, 127]),
        ("uint", (">", -1), [0, 7, 2**62]),
        ("uint", (">=", 2**64 - 1), []),
        ("float", ("==", -0.0), [0.0]),
        ("float", ("in", [-0.0]), [0.0]),
        ("decimal", (">=", 1), [Decimal("1.50")]),
        ("decimal", ("==", 1.5), [Decimal("1.50")]),
        ("text", ("in", ("ü", "x")), ["ü"]),
        ("int", ("in", np.array([1, -5])), [1, -5]),
        ("int", ("==", np.int32(1)), [1]),
    ],
)
def test_values_of_another_type_are_compared_as_numbers_are(
    name: str, term: tuple[str, Any], wanted: list[Any]
) -> None:
    kind, values = VALUES[name]
    body = of_table(pa.table({name: pa.array(values, kind)}), row_group_size=1)
    form = Parquet(where=[(name, *term)])
    assert [one[name] for one in opened(form, body, indexed(form, body))] == wanted


@pytest.mark.parametrize("statistics", [True, False])
def test_values_are_compared_exactly_where_their_types_differ(statistics: bool) -> None:
    table = pa.table({
        "row": [0, 1],
        "nano": pa.array([-1, 2**62], pa.timestamp("ns")),
        "decimal": pa.array([Decimal(2**53), Decimal(2**53 + 1)], pa.decimal128(38, 10)),
        "tenth": pa.array([Decimal("0.10"), Decimal("0.11")], pa.decimal128(9, 2)),
        "unsigned": pa.array([7, 2**64 - 1], pa.uint64()),
    })  # fmt: skip
    body = of_table(table, row_group_size=1, write_statistics=statistics)
    for *term, wanted in [
        ("nano", "<", dt.datetime(9999, 1, 1), [0, 1]), ("nano", "<=", dt.datetime(1, 1, 1), []),  # noqa: DTZ001
        ("nano", "in", [dt.datetime(9999, 1, 1)], []), ("nano", "<", dt.datetime(1970, 1, 1), [0]),  # noqa: DTZ001
        ("decimal", "==", 2.0**53, [0]), ("decimal", ">", 2.0**53, [1]), ("tenth", "==", 0.1, [0]),
        ("unsigned", ">", 2**63, [1]), ("unsigned", "==", 2.0**64, []), ("unsigned", "<", 2.0**64, [0, 1]),
    ]:  # fmt: skip
        form = Parquet(columns=["row"], where=[tuple(term)])
        assert [one["row"] for one in opened(form, body, indexed(form, body))] == wanted, term


LARGE = 10**400  # no float is as large


@pytest.mark.parametrize("name", ["int", "uint", "float", "single"])
@pytest.mark.parametrize("statistics", [True, False])
def test_numbers_larger_than_any_are_above_all_or_below(name: str, statistics: bool) -> None:
    kind, values = VALUES[name]
    plain = [value for value in values if value is not None and math.isfinite(value)]
    body = of_table(pa.table({name: pa.array(plain, kind)}), row_group_size=1, write_statistics=statistics)
    for op, value, is_kept in [
        ("<", LARGE, True), (">=", LARGE, False), (">", -LARGE, True), ("<=", -LARGE, False), ("==", LARGE, False),
        ("!=", -LARGE, True), ("in", [LARGE, plain[0]], None), ("not in", [LARGE, -LARGE], True),
    ]:  # fmt: skip
        form = Parquet(where=[(name, op, value)])
        wanted = plain[:1] if is_kept is None else plain if is_kept else []
        assert [one[name] for one in opened(form, body, indexed(form, body))] == wanted, op


@pytest.mark.parametrize("text", ["nan", "sNaN"])
@pytest.mark.parametrize("value", [1, 1.0, Decimal(1)])
def test_folder_that_says_nan_is_an_error_that_names_the_file_and_the_column(text: str, value: Any) -> None:
    url = put(TABLE, f"x={text}/0.parquet")
    for op in ("==", ">", "in"):
        data = hr.stream(url, format=hr.Parquet(where=[("x", op, [value] if op == "in" else value)]))
        with pytest.raises(FormatError, match=rf"^{url}: its folder says x='{text}', .* compares 'x' with the n"):
            len(data)


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"fixed", "decimal"}))
def test_groups_that_cannot_hold_are_left_out_by_their_statistics(name: str) -> None:
    kind, values = VALUES[name]
    plain = sorted(value for value in values if value is not None and value == value and value != math.inf)
    body = of_table(pa.table({name: pa.array(plain, kind)}), row_group_size=1)
    for value in plain:
        rows = indexed(Parquet(where=[(name, "==", value)]), body)
        assert len(rows) == plain.count(value), "zeros are equal" if value == 0 else name
    nothing = of_table(pa.table({name: pa.nulls(4, kind)}))
    assert not len(indexed(Parquet(where=[(name, "==", plain[0])]), nothing))
    assert len(indexed(Parquet(where=[(name, "not in", [plain[0]])]), nothing)) == 4


def test_statistics_of_unknown_meaning_leave_nothing_out() -> None:
    kind, values = VALUES["int"]
    body = of_table(pa.table({"int": pa.array(values[1:], kind)}), row_group_size=1)
    form = Parquet(where=[("int", "==", 1)])
    assert len(indexed(form, body)) == 1
    for without in (
        of_table(pa.table({"int": pa.array(values[1:], kind)}), row_group_size=1, write_statistics=False),
        body.replace(b"\x1c\x1c\x00\x00", b"\x1c\x2c\x00\x00"),  # an order of columns that is another than their type's
    ):
        rows = indexed(form, without)
        assert len(rows) == 5
        assert [one["int"] for one in opened(form, without, rows)] == [1]


def put(table: pa.Table, name: str, **options: Any) -> str:
    url = f"memory://where/{next(NUMBERS)}/{name}"
    memory.put(url, of_table(table, **options))
    return url


TABLE = pa.table({"n": range(100), "lang": ["en", "de", None, "fr"] * 25, "text": [f"text {k}" for k in range(100)]})
SOME = [("n", ">=", 35), ("n", "<", 52), ("lang", "in", {"en", "fr"})]
KEPT = [35, 36, 39, 40, 43, 44, 47, 48, 51]


@pytest.mark.slow
def test_rows_are_left_out_as_by_a_filter_and_states_are_exact() -> None:
    urls = [put(TABLE, f"{k}.parquet", row_group_size=10, write_page_index=True) for k in range(2)]
    data = hr.stream(urls, format=hr.Parquet(columns=["text"], where=SOME))
    assert [one["text"] for one in data] == [f"text {k}" for k in KEPT] * 2
    assert set(next(iter(data))) == {"__key__", "__url__", "text"}, "what is asked is no field of samples"
    assert sorted(one["text"] for one in data.shuffle("global")) == sorted([f"text {k}" for k in KEPT] * 2)
    with pytest.raises(TypeError, match=r"where\(n >= 35 and n < 52 and lang in \('en', 'fr'\)\).* has no length"):
        len(data)
    for shuffled in (data.shuffle(), data.shuffle("global")):
        whole = [batch["text"] for batch in hr.DataLoader(shuffled, batch_size=4)]
        with hr.DataLoader(shuffled, batch_size=4) as loader:
            batches = iter(loader)
            first = [next(batches)["text"] for _ in range(2)]
            state = loader.state_dict()
        with hr.DataLoader(shuffled, batch_size=4) as again:
            again.load_state_dict(state)
            assert first + [batch["text"] for batch in again] == whole
    other = hr.stream(urls, format=hr.Parquet(columns=["text"], where=[*SOME[:2], ("lang", "in", ["en"])]))
    with hr.DataLoader(other.shuffle("global"), batch_size=4) as loader, pytest.raises(StateMismatchError):
        loader.load_state_dict(state)


@pytest.mark.slow
def test_ranks_share_the_rows_as_those_of_a_filter() -> None:
    data = hr.stream(put(TABLE, "0.parquet", row_group_size=10), format=hr.Parquet(where=SOME)).to_tuple("n")

    def numbers(data: hr.Stream) -> list[int]:
        got = []
        for rank in range(2):
            with hr.DataLoader(data, batch_size=2, rank=rank, world_size=2) as loader:
                got += [int(n) for (numbers,) in loader for n in numbers]
        return got

    with pytest.raises(OptionError, match=r"where\(.*\) changes the number of samples.*\.epoch\(samples=N\)"):
        numbers(data)
    got = numbers(data.epoch(samples=8))
    assert len(got) == 8
    assert set(got) <= set(KEPT)


@pytest.mark.process
def test_what_is_left_out_is_not_read() -> None:
    with FaultServer() as server:
        urls = [
            server.add(f"lang={lang}/0.parquet", of_table(TABLE.drop(["lang"]), row_group_size=10, compression="none"))
            for lang in ("en", "de", "__HIVE_DEFAULT_PARTITION__")
        ]
        data = hr.stream(urls, format=hr.Parquet(where=[("lang", "=", "de")]))
        assert len(data) == 100, "folders say it before anything is read"
        assert data[42]["lang"] == "de"
        assert all("lang=de" in request.target for request in server.log)
        server.log.clear()
        data = hr.stream(urls, format=hr.Parquet(where=[[("lang", "=", "de"), ("n", "<", 5)], [("lang", "=", "en")]]))
        assert [one["n"] for one in data.select("n")] == [*range(100), *range(5)]
        server.log.clear()
        data = hr.stream(urls[0], format=hr.Parquet(where=[("n", "in", [42])]))
        assert [one["text"] for one in data.select("text")] == ["text 42"]
        ranges = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.log]
        nbytes = sum(int(stop) + 1 - int(start) for start, stop in ranges if start and int(stop) < 9000)
        assert nbytes < 1000, "of the rows one group's columns"


def test_folders_are_compared_as_what_they_are_compared_with() -> None:
    folders = ("year=2025/day=2025-03-01/is=true", "year=0999/day=1999-01-01/is=False")
    urls = [put(pa.table({"n": [k]}), f"{folder}/0.parquet") for k, folder in enumerate(folders)]

    def kept(*where: tuple[str, str, Any]) -> list[int]:
        return [one["n"] for one in hr.stream(urls, format=hr.Parquet(where=list(where)))]

    assert kept(("year", ">", 1000)) == [0]
    assert kept(("year", "in", [999.0])) == [1]
    assert kept(("year", "=", "0999")) == [1]
    wide = put(TABLE, f"id={2**53 + 1}/0.parquet")
    assert not list(hr.stream(wide, format=hr.Parquet(where=[("id", "=", 2.0**53)])))
    assert kept(("day", "<", dt.date(2000, 1, 1)), ("is", "!=", True)) == [1]
    with pytest.raises(
        FormatError, match="its folder says day='2025-03-01', and where= compares 'day' with the number 3"
    ):
        kept(("day", ">", 3))
    both = put(pa.table({"year": ["x"]}), "year=2025/0.parquet")
    with pytest.raises(FormatError, match="column 'year' lies in it, and its folder says '2025'"):
        list(hr.stream(both, format=hr.Parquet(where=[("year", "=", "2025")])))


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ([("x", "=", 1)], "has no column 'x'; its columns are: lang, n, text"),
        ([("n", "=", "1")], "compares column 'n' with the text '1', and it is int64"),
        ([("lang", ">", 1)], "compares column 'lang' with the number 1, and it is text"),
        ([("list", "=", 1)], "compares column 'list' with the number 1, and it is list of"),
    ],
)
def test_predicate_that_fits_no_column_is_an_error_that_names_it(where: Any, why: str) -> None:
    table = TABLE.append_column("list", [[[1]] * 100]) if where[0][0] == "list" else TABLE
    with pytest.raises(FormatError, match=why) as caught:
        list(hr.stream(put(table, "0.parquet"), format=hr.Parquet(where=where)))
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        [], "n > 3", ["n > 3"], [("n", ">")], ("n", ">", 3), [("n", "~", 3)], [("n", "=", None)], [("n", "in", [])],
        [("n", "in", 3)], [("n", "in", "abc")], [("n", "=", math.nan)], [("n", "=", [1])], [("n", "in", [1, "a"])],
        [("n", "=", Decimal("sNaN"))],
        [("n", ">", True)], [[]], [[("n", ">", 3)], ("n", ">", 3)], [(3, "=", 3)],
    ],
)  # fmt: skip
def test_what_is_no_predicate_is_refused(where: Any) -> None:
    with pytest.raises(OptionError, match="where="):
        hr.Parquet(where=where)


def test_predicate_is_the_same_in_every_process() -> None:
    texts = {f"{k}" for k in range(50)}
    first, second = (Parquet(where=[("a", "in", some)]) for some in (texts, sorted(texts, reverse=True)))
    assert first.row_filter(["memory://a"]) == second.row_filter(["memory://a"])


def test_name_of_a_long_predicate_is_short_and_its_own() -> None:
    def name(where: list[Any]) -> str:
        rows = Parquet(where=where).row_filter(["memory://a"])
        assert rows is not None
        return rows.text

    many = list(range(10_000))
    wheres: list[list[Any]] = [
        [("a", "in", many)], [("a", "in", [*many[:-1], 10_000])], [("a", "=", "x" * 500)], [("a", "=", "x" * 501)],
        [("a", "=", "x" * 90)], [("a", "=", "x" * 91)], [("a", "=", 1), ("b", "=", 2)], [("a == 1 and b", "=", 2)],
    ]  # fmt: skip
    names = [name(where) for where in wheres]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 250
    assert names[0].startswith("where(a in (0, 1, 2, ")


def test_state_is_of_the_values_that_it_was_taken_of_when_these_are_long() -> None:
    texts = [f"{'x' * 300}{k % 2}" for k in range(20)]
    url = put(pa.table({"n": range(20), "text": texts}), "0.parquet")

    def loader(text: str) -> hr.DataLoader[Any]:
        data = hr.stream(url, format=hr.Parquet(columns=["n"], where=[("text", "=", text)]))
        return hr.DataLoader(data.shuffle("global", seed=1), batch_size=2)

    with loader(texts[0]) as first:
        next(iter(first))
        state = first.state_dict()
    with loader(texts[1]) as other, pytest.raises(StateMismatchError):
        other.load_state_dict(state)


class Counted(str):
    """A text that knows how often texts like it were made bytes."""

    __slots__ = ()
    times = 0

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        Counted.times += 1
        return super().encode(encoding, errors)


def test_values_are_made_ready_once_for_all_groups_of_a_file() -> None:
    body = of_table(pa.table({"text": [f"{k:03}" for k in range(100)]}), row_group_size=2)
    wanted = [Counted(f"{k:03}") for k in (*range(40, 43), *range(200, 900))]
    Counted.times = 0
    rows = indexed(Parquet(where=[("text", "in", wanted)]), body)
    assert rows.keys.tolist() == [b"40", b"41", b"42", b"43"]
    assert 0 < Counted.times <= len(wanted)
    assert len(indexed(Parquet(where=[("text", "not in", wanted)]), body)) == 100


def test_options_of_a_format_are_refused_where_they_do_not_belong() -> None:
    for name, there in (("columns", "columns"), ("where", "where"), ("filters", "where")):
        options: Any = {name: ["n"]}
        with pytest.raises(TypeError, match=rf"argument '{name}': .*format=hr\.Parquet\({there}="):
            hr.stream("memory://where/0.parquet", **options)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colums'$"):
        hr.stream("memory://where/0.parquet", colums=["n"])  # type: ignore[arg-type]
