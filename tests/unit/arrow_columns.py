"""Columns of every type that Arrow has and Parquet can hold, each of four rows."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from typing import Any

import numpy as np
import pyarrow as pa

DAY, HOUR = dt.date(2026, 1, 2), dt.timedelta(hours=1)
TIME = dt.datetime(2026, 1, 2, 3, 4, 5, 678)  # noqa: DTZ001
ZONED = TIME.replace(microsecond=5000, tzinfo=dt.UTC)
ARRAYS = {
    "int": pa.array([1, -(2**62), None, 4]),
    "uint": pa.array([1, 2**64 - 1, None, 4], pa.uint64()),
    "int8": pa.array([1, -128, None, 4], pa.int8()),
    "float": pa.array([1.5, None, -0.0, float("inf")]),
    "half": pa.array(np.array([1, 2, 3, 0.5], np.float16)),
    "bool": pa.array([True, None, False, True]),
    "text": pa.array(["a", "grüße\u2028", None, ""]),
    "large": pa.array(["a", "ü", None, ""], pa.large_string()),
    "bytes": pa.array([b"a", b"", None, bytes(300)]),
    "fixed": pa.array([b"ab", b"cd", None, b"xy"], pa.binary(2)),
    "dictionary": pa.array(["a", "b", None, "a"]).dictionary_encode(),
    "decimal": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-3.25"), decimal.Decimal(0)]),
    "date": pa.array([DAY, None, DAY, DAY]),
    "time": pa.array([TIME, None, TIME, TIME]),
    "zone": pa.array([TIME, None, TIME, TIME], pa.timestamp("us", "Europe/Berlin")),
    "clock": pa.array([TIME.time(), None, TIME.time(), TIME.time()]),
    "duration": pa.array([dt.timedelta(seconds=3), None, None, dt.timedelta(days=-1)]),
    "null": pa.nulls(4),
    "list": pa.array([[1, 2], [], None, [4, 5, 6]]),
    "gaps": pa.array([[1, 2], [None], None, [4, None, 6]], pa.list_(pa.float64())),
    "texts": pa.array([["a", None], [], None, ["ü"]]),
    "square": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.int32(), 2)),
    "lists": pa.array([[[1, 2], []], [], None, [[3], None]]),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}, {"a": 2, "b": "y"}]),
    "structs": pa.array([[{"a": 1, "b": ["x"]}], [], None, [{"a": None, "b": None}, None]]),
    "map": pa.array([[("k", 1)], [], None, [("a", None), ("b", 2)]], pa.map_(pa.string(), pa.int64())),
}


KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int": (pa.int64(), [None, 0, 1, -5, 2**62, -(2**63)]),
    "int8": (pa.int8(), [None, -128, 0, 127]),
    "uint16": (pa.uint16(), [0, 7, 40_000]),
    "uint32": (pa.uint32(), [None, 0, 7, 2**31, 2**32 - 1]),
    "uint64": (pa.uint64(), [None, 0, 7, 2**62]),
    "float": (pa.float64(), [None, math.nan, 0.0, 1.5, -math.inf, math.inf]),
    "single": (pa.float32(), [None, math.nan, 0.0, 1.5, -2.25]),
    "bool": (pa.bool_(), [None, True, False]),
    "text": (pa.string(), [None, "", "a", "ab", "ü", "b" * 200, "b" * 199 + "c", "\U0010ffff" * 30]),
    "large": (pa.large_string(), [None, "a", "b"]),
    "words": (pa.dictionary(pa.int32(), pa.string()), [None, "a", "b", "c"]),
    "bytes": (pa.binary(), [None, b"", b"\0", b"\xff" * 100, b"\xff" * 99, b"a\xff"]),
    "fixed": (pa.binary(2), [None, b"ab", b"\xff\0"]),
    "date": (pa.date32(), [None, DAY, dt.date(1969, 12, 31), dt.date(9999, 1, 1)]),
    "time": (pa.timestamp("us"), [None, TIME, TIME + HOUR, dt.datetime(1969, 1, 1)]),  # noqa: DTZ001
    "zoned": (pa.timestamp("ms", "UTC"), [None, ZONED, ZONED + HOUR]),
    "nano": (pa.timestamp("ns"), [None, TIME, TIME + HOUR]),
    "decimal": (pa.decimal128(9, 2), [None, decimal.Decimal("1.50"), decimal.Decimal("-3.25"), decimal.Decimal(0)]),
    "null": (pa.int32(), [None]),
}
"""Types of columns that predicates compare, and values of each."""


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value.tolist()]
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value
