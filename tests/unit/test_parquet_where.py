"""Predicates on Parquet: rows are those that pyarrow's own filters give, and what cannot hold is not read."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.loops import flat, given, loaded, rest_of, state_after
from builders.parquet import of_table, pages_table
from builders.stored import ranges, rows
from hypothesis import settings
from hypothesis import strategies as st
from unit.arrow_columns import KINDS, plain
from unit.parquet_reads import indexed, put, rows_of

import headrace as hr
from headrace.errors import FormatError, OptionError, StateMismatchError
from headrace.formats.parquet.format import Parquet
from headrace.testing import FaultServer

ORDERED = ("=", "==", "!=", "<", "<=", ">", ">=")


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, list[str]]:
    """A table with up to three columns of some kinds, and their names."""
    count = draw(st.integers(0, 25))
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True))
    columns: dict[str, Any] = {}
    for name in names:
        kind, values = KINDS[name]
        cuts = sorted(draw(st.lists(st.integers(0, count), max_size=6)))
        some = [draw(st.sampled_from(values)) for _ in range(len(cuts) + 1)]
        stretched = [value for value, a, b in zip(some, [0, *cuts], [*cuts, count], strict=True) for _ in range(b - a)]
        columns[name] = pa.array(draw(st.permutations(stretched)) if draw(st.booleans()) else stretched, kind)
    columns["row"] = pa.array(range(count), pa.int64())
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


@settings(max_examples=150)
@hypothesis.given(st.data())
def test_rows_equal_those_filtered_by_pyarrow(data: st.DataObject) -> None:
    table, names = data.draw(tables())
    where: Any = data.draw(predicates(names))
    where = where if data.draw(st.booleans()) else where[0]
    body = of_table(
        table,
        row_group_size=data.draw(st.integers(1, 9)),
        write_statistics=data.draw(st.sampled_from([True, True, ["row"], False])),
    )
    form = Parquet(columns=["row"], where=where)
    found = indexed(form, body).rows
    # of the table, not of the file: by statistics pyarrow excludes rows of NaN, and zeros of another sign
    wanted = table.filter(pq.filters_to_expression(where))["row"].to_pylist()
    assert [one["row"] for one in rows_of(form, body, found)] == wanted
    assert {int(key) for key in found.keys} >= set(wanted), "keys are the numbers of rows in the file"


FEW = pages_table(1500)
WHERE = [[("n", ">=", 690), ("n", "<", 720)], [("n", "in", [1, 1201])]]
LEFT = [1, *range(690, 720), 1201]


@pytest.mark.slow
@pytest.mark.parametrize("by", [None, "window", "global"])
def test_filtered_rows_can_be_shuffled_divided_and_resumed(by: Any) -> None:
    url = put(FEW, row_group_size=100)
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


@pytest.mark.parametrize(("name", "term", "wanted"), [
    ("int", ("<", 0.5), [0, -5, -(2**63)]),
    ("int", ("<", 1.0), [0, -5, -(2**63)]),
    ("int", ("!=", 0.5), [0, 1, -5, 2**62, -(2**63)]),
    ("int", ("in", [0.5, 1.0]), [1]),
    ("int", (">", -math.inf), [0, 1, -5, 2**62, -(2**63)]),
    ("int8", ("<", 1000), [-128, 0, 127]),
    ("int8", (">", 1000), []),
    ("int8", ("not in", [1000]), [None, -128, 0, 127]),
    ("uint64", (">", -1), [0, 7, 2**62]),
    ("uint64", (">=", 2**64 - 1), []),
    ("float", ("==", -0.0), [0.0]),
    ("float", ("in", [-0.0]), [0.0]),
    ("decimal", (">=", 1), [Decimal("1.50")]),
    ("decimal", ("==", 1.5), [Decimal("1.50")]),
    ("text", ("in", ("ü", "x")), ["ü"]),
    ("int", ("in", np.array([1, -5])), [1, -5]),
    ("int", ("==", np.int32(1)), [1]),
])  # fmt: skip
def test_values_of_other_types_are_compared_as_numbers(name: str, term: tuple[str, Any], wanted: list[Any]) -> None:
    kind, values = KINDS[name]
    body = of_table(pa.table({name: pa.array(values, kind)}), row_group_size=1)
    assert [one[name] for one in rows_of(Parquet(where=[(name, *term)]), body)] == wanted


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
        assert [one["row"] for one in rows_of(Parquet(columns=["row"], where=[tuple(term)]), body)] == wanted, term


LARGE = 10**400  # no float is as large


@pytest.mark.parametrize("name", ["int", "uint64", "float", "single"])
@pytest.mark.parametrize("statistics", [True, False])
def test_numbers_beyond_any_float_are_compared(name: str, statistics: bool) -> None:
    kind, values = KINDS[name]
    plain = [value for value in values if value is not None and math.isfinite(value)]
    body = of_table(pa.table({name: pa.array(plain, kind)}), row_group_size=1, write_statistics=statistics)
    for op, value, is_kept in [
        ("<", LARGE, True), (">=", LARGE, False), (">", -LARGE, True), ("<=", -LARGE, False), ("==", LARGE, False),
        ("!=", -LARGE, True), ("in", [LARGE, plain[0]], None), ("not in", [LARGE, -LARGE], True),
    ]:  # fmt: skip
        wanted = plain[:1] if is_kept is None else plain if is_kept else []
        assert [one[name] for one in rows_of(Parquet(where=[(name, op, value)]), body)] == wanted, op


@pytest.mark.parametrize("text", ["nan", "sNaN"])
@pytest.mark.parametrize("value", [1, 1.0, Decimal(1)])
def test_folder_named_nan_is_an_error_that_names_file_and_column(text: str, value: Any) -> None:
    url = put(TABLE, f"x={text}/0.parquet")
    for op in ("==", ">", "in"):
        data = hr.stream(url, format=hr.Parquet(where=[("x", op, [value] if op == "in" else value)]))
        with pytest.raises(FormatError, match=rf"^{url}: its folder .* x='{text}', .* compares 'x' with the n"):
            len(data)


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"fixed", "decimal", "null"}))
def test_groups_are_excluded_by_their_statistics(name: str) -> None:
    kind, values = KINDS[name]
    plain = sorted(value for value in values if value is not None and value == value and value != math.inf)
    body = of_table(pa.table({name: pa.array(plain, kind)}), row_group_size=1)
    for value in plain:
        rows = indexed(Parquet(where=[(name, "==", value)]), body).rows
        assert len(rows) == plain.count(value), "zeros are equal" if value == 0 else name
    nothing = of_table(pa.table({name: pa.nulls(4, kind)}))
    assert not len(indexed(Parquet(where=[(name, "==", plain[0])]), nothing).rows)
    assert len(indexed(Parquet(where=[(name, "not in", [plain[0]])]), nothing).rows) == 4


def test_statistics_of_unknown_meaning_exclude_nothing() -> None:
    kind, values = KINDS["int"]
    table, form = pa.table({"int": pa.array(values[1:], kind)}), Parquet(where=[("int", "==", 1)])
    body = of_table(table, row_group_size=1)
    assert len(indexed(form, body).rows) == 1
    for without in (
        of_table(table, row_group_size=1, write_statistics=False),
        body.replace(b"\x1c\x1c\x00\x00", b"\x1c\x2c\x00\x00"),  # an order of columns that is another than their type's
    ):
        rows = indexed(form, without).rows
        assert len(rows) == 5
        assert [one["int"] for one in rows_of(form, without, rows)] == [1]


TABLE = pa.table({"n": range(100), "lang": ["en", "de", None, "fr"] * 25, "text": [f"text {k}" for k in range(100)]})
SOME = [("n", ">=", 35), ("n", "<", 52), ("lang", "in", {"en", "fr"})]
KEPT = [35, 36, 39, 40, 43, 44, 47, 48, 51]


@pytest.mark.slow
def test_stream_of_a_predicate_has_no_length_and_its_own_states() -> None:
    urls = [put(TABLE, f"{k}.parquet", row_group_size=10) for k in range(2)]
    data = hr.stream(urls, format=hr.Parquet(columns=["text"], where=SOME))
    assert rows(data) == [{"text": f"text {k}"} for k in KEPT] * 2, "columns of the predicate are no fields"
    assert sorted(one["text"] for one in data.shuffle("global")) == sorted([f"text {k}" for k in KEPT] * 2)
    with pytest.raises(TypeError, match=r"where\(n >= 35 and n < 52 and lang in \('en', 'fr'\)\).* has no length"):
        len(data)
    with pytest.raises(OptionError, match=r"where\(.*\) changes the number of samples.*\.epoch\(samples=N\)"):
        given(data, 2, ranks=hr.Ranks(rank=0, world_size=2))
    state = state_after(hr.DataLoader(data.shuffle("global"), batch_size=4), 1)
    other = hr.stream(urls, format=hr.Parquet(columns=["text"], where=[*SOME[:2], ("lang", "in", ["en"])]))
    with pytest.raises(StateMismatchError):
        rest_of(hr.DataLoader(other.shuffle("global"), batch_size=4), state)


@pytest.mark.process
def test_excluded_rows_are_not_read() -> None:
    with FaultServer() as server:
        body = of_table(TABLE.drop(["lang"]), row_group_size=10, compression="none")
        urls = [server.add(f"lang={lang}/0.parquet", body) for lang in ("en", "de", "__HIVE_DEFAULT_PARTITION__")]
        data = hr.stream(urls, format=hr.Parquet(where=[("lang", "=", "de")]))
        assert len(data) == 100, "by the folders alone"
        assert data[42]["lang"] == "de"
        assert all("lang=de" in request.target for request in server.log)
        server.log.clear()
        data = hr.stream(urls, format=hr.Parquet(where=[[("lang", "=", "de"), ("n", "<", 5)], [("lang", "=", "en")]]))
        assert [one["n"] for one in data.select("n")] == [*range(100), *range(5)]
        server.log.clear()
        data = hr.stream(urls[0], format=hr.Parquet(where=[("n", "in", [42])]))
        assert [one["text"] for one in data.select("text")] == ["text 42"]
        nbytes = sum(stop - start for start, stop in ranges(server) if stop <= 9000)
        assert nbytes < 1000, "the columns of one group of rows"


def test_folder_values_take_the_type_they_are_compared_with() -> None:
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
    with pytest.raises(FormatError, match=r"its folder .* day='2025-03-01', and where= compares 'day' with the number"):
        kept(("day", ">", 3))
    both = put(pa.table({"year": ["x"]}), "year=2025/0.parquet")
    with pytest.raises(FormatError, match=r"column 'year' .*, and its folder .* '2025'"):
        list(hr.stream(both, format=hr.Parquet(where=[("year", "=", "2025")])))


@pytest.mark.parametrize(("where", "why"), [
    ([("x", "=", 1)], "has no column 'x'; its columns are: lang, n, text"),
    ([("n", "=", "1")], "compares column 'n' with the text '1', and it is int64"),
    ([("lang", ">", 1)], "compares column 'lang' with the number 1, and it is text"),
    ([("list", "=", 1)], "compares column 'list' with the number 1, and it is list of"),
])  # fmt: skip
def test_predicate_that_fits_no_column_is_an_error_that_names_it(where: Any, why: str) -> None:
    table = TABLE.append_column("list", [[[1]] * 100]) if where[0][0] == "list" else TABLE
    with pytest.raises(FormatError, match=why) as caught:
        list(hr.stream(put(table, "0.parquet"), format=hr.Parquet(where=where)))
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("where", [
    [], "n > 3", ["n > 3"], [("n", ">")], ("n", ">", 3), [("n", "~", 3)], [("n", "=", None)], [("n", "in", [])],
    [("n", "in", 3)], [("n", "in", "abc")], [("n", "=", math.nan)], [("n", "=", [1])], [("n", "in", [1, "a"])],
    [("n", "=", Decimal("sNaN"))],
    [("n", ">", True)], [[]], [[("n", ">", 3)], ("n", ">", 3)], [(3, "=", 3)],
])  # fmt: skip
def test_invalid_predicate_is_refused(where: Any) -> None:
    with pytest.raises(OptionError, match="where="):
        hr.Parquet(where=where)


def test_predicate_is_the_same_in_every_process() -> None:
    texts = {f"{k}" for k in range(50)}
    first, second = (Parquet(where=[("a", "in", some)]) for some in (texts, sorted(texts, reverse=True)))
    assert first.row_filter(["memory://a"]) == second.row_filter(["memory://a"])


def test_name_of_a_long_predicate_is_short_and_unique() -> None:
    def name(where: list[Any]) -> str:
        return Parquet(where=where).row_filter(["memory://a"]).text  # type: ignore[union-attr]

    many = list(range(10_000))
    wheres: list[list[Any]] = [
        [("a", "in", many)], [("a", "in", [*many[:-1], 10_000])], [("a", "=", "x" * 500)], [("a", "=", "x" * 501)],
        [("a", "=", "x" * 90)], [("a", "=", "x" * 91)], [("a", "=", 1), ("b", "=", 2)], [("a == 1 and b", "=", 2)],
    ]  # fmt: skip
    names = [name(where) for where in wheres]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 250
    assert names[0].startswith("where(a in (0, 1, 2, ")


def test_options_of_a_format_are_refused_where_they_do_not_belong() -> None:
    for name, there in (("columns", "columns"), ("where", "where"), ("filters", "where")):
        options: Any = {name: ["n"]}
        with pytest.raises(TypeError, match=rf"argument '{name}': .*format=hr\.Parquet\({there}="):
            hr.stream("memory://where/0.parquet", **options)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colums'$"):
        hr.stream("memory://where/0.parquet", colums=["n"])  # type: ignore[arg-type]
