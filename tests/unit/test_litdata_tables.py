"""LitData's index of Parquet files: order, columns, and an index that does not fit its files."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from end_to_end import litdata, parquet

import headrace as hr
from headrace.errors import FormatError, ObjectMissingError, OptionError, StageError
from headrace.fetch.stores import memory
from headrace.formats.litdata.format import LitData

SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})


def file_of(start: int, stop: int) -> bytes:
    return parquet.written([{"n": n, "text": "x" * n} for n in range(start, stop)], SCHEMA, row_group_size=4)


TABLES = {"b.parquet": (10, file_of(0, 10)), "deep/a.parquet": (5, file_of(10, 15)), "c.parquet": (0, file_of(0, 0))}


def index_with(number: int = 0, config: dict[str, Any] | None = None, **chunk: Any) -> dict[str, bytes]:
    files = litdata.of_tables(TABLES, **(config or {}))
    index = json.loads(files["index.json"])
    index["chunks"][number].update(chunk)
    return {**files, "index.json": json.dumps(index).encode()}


def numbers(data: hr.Stream) -> list[int]:
    return [sample["n"] for sample in data]


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "litdata", LitData()])
@pytest.mark.parametrize("end", ["", "/", "/index.json"])
def test_files_are_read_in_the_order_of_the_index(form: Any, end: str) -> None:
    data = hr.stream(litdata.put("lit-tables", litdata.of_tables(TABLES)) + end, format=form)
    assert numbers(data) == list(range(15))
    assert (len(data), data[12]["text"]) == (15, "x" * 12)
    assert "parquet, by litdata's index.json" in str(data.describe())


def test_files_that_the_index_does_not_name_are_not_read() -> None:
    place = litdata.put("lit-more", litdata.of_tables({name: TABLES[name] for name in ("deep/a.parquet",)}))
    memory.put(f"{place}/b.parquet", TABLES["b.parquet"][1])
    assert numbers(hr.stream(place)) == list(range(10, 15))


def test_columns_and_where_are_those_of_parquet() -> None:
    place = litdata.put("lit-some", litdata.of_tables(TABLES))
    some = hr.stream(place, format=LitData(parquet=hr.Parquet(columns=["n"], where=[("n", ">", 8)])))
    assert numbers(some) == list(range(9, 15))
    assert "text" not in next(iter(some))


def test_several_folders_come_one_after_the_other() -> None:
    first = litdata.put("lit-first", litdata.of_tables({"deep/a.parquet": TABLES["deep/a.parquet"]}))
    other = litdata.put("lit-other", litdata.of_tables({"b.parquet": TABLES["b.parquet"]}))
    assert numbers(hr.stream([first, other])) == [*range(10, 15), *range(10)]
    items = litdata.put("lit-items", litdata.folder([[{"n": 1, "text": "a"}]]))
    with pytest.raises(OptionError, match=r"lit-items has shards of litdata, and others of parquet"):
        hr.stream([first, items])
    with pytest.raises(OptionError, match=r"lit-first has shards of parquet, and others of litdata"):
        hr.stream([items, first])


@pytest.mark.parametrize(
    ("claim", "why"), [({"chunk_size": 9}, "9"), ({"chunk_size": 11}, "11"), ({"chunk_bytes": 7}, "10 in 7")]
)
def test_file_that_differs_from_the_index_is_an_error(claim: dict[str, int], why: str) -> None:
    place = litdata.put("lit-wrong", index_with(**claim))
    rows = f"10 rows in {len(TABLES['b.parquet'][1])} bytes"
    for use in (len, list, lambda data: data[14]):
        with pytest.raises(
            FormatError, match=rf"lit-wrong/b\.parquet is damaged.*{rows},.*lit-wrong/index\.json \w+ {why}"
        ):
            use(hr.stream(place))


def test_changed_and_missing_files_are_errors_that_name_them() -> None:
    place = litdata.put("lit-changed", litdata.of_tables(TABLES))
    memory.put(f"{place}/b.parquet", file_of(0, 10)[:-1])
    with pytest.raises(FormatError, match=r"b\.parquet is damaged"):
        list(hr.stream(place))
    memory.put(f"{place}/b.parquet", file_of(0, 10))
    memory.remove(f"{place}/deep/a.parquet")
    with pytest.raises(ObjectMissingError, match=r"deep/a\.parquet"):
        list(hr.stream(place))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (index_with(filename="../x.parquet"), "chunk 0: .*outside"),
        (index_with(1, filename=None), "chunk 1: .*called"),
        (index_with(1, filename="b.parquet"), "entries 0 and 1 both name .*twice"),
        (index_with(2, chunk_size=-1), "chunk 2: it has '-1' items"),
        (index_with(chunk_bytes=True), "chunk 0: .*bytes"),
        (index_with(config={"compression": "zstd"}), "compressed or encrypted"),
        (index_with(config={"encryption": {"algorithm": "fernet"}}), "compressed or encrypted"),
    ],
)
def test_damaged_index_is_an_error_with_the_reason(files: dict[str, bytes], why: str) -> None:
    with pytest.raises(StageError, match=rf"memory://lit-damaged/index\.json is damaged: .*{why}"):
        hr.stream(litdata.put("lit-damaged", files))
    with pytest.raises(OptionError, match="names no shards"):
        hr.stream(litdata.put("lit-empty", litdata.of_tables({})))
