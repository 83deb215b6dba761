"""JSON texts are what Python's own json makes of them, with orjson and without it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.formats import lines
from headrace.formats.lines import loads, loads_many

NUMBERS = [
    "-0", "-0.0", "1e400", "-1e999", "1e-400", "NaN", "Infinity", "-Infinity", "18446744073709551615", "9" * 19,
    "18446744073709551616", "-9223372036854775808", "-9223372036854775809", "1" * 30, "1" * 30 + ".5", "9" * 5000,
    "0.00012345678901234567", "0.1234567890123456", "01", "1.", ".5", "+1", "1E5", "2.2250738585072011e-308",
    "1234567890123456:", "123456789012345678901234567890e-10", "1" * 18,
]  # fmt: skip
OTHERS = [
    '"\\ud800"', '"\\ud83d\\ude00"', '"\x7f"', '"\x00"', '"\\u0000"', "[1,]", '{"a":1,"b":2,"a":3}', "\ufeff1", "",
    "null", " \r\n\t1 ", "1 2", "{'a':1}", "1\x0b",
]  # fmt: skip


def outcome(loads: Any, text: bytes) -> str:
    """The value, as only equal ones are written, in the order of their names; or the error."""
    try:
        return repr(loads(text))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def check(texts: list[bytes]) -> None:
    expected = [outcome(lambda text: json.loads(str(text, "utf-8")), text) for text in texts]
    assert [outcome(loads, text) for text in texts] == expected
    for value, one in zip(loads_many(texts), expected, strict=False):
        assert value is None or repr(value) == one


@pytest.fixture(params=["with orjson", "without"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(lines, "_orjson", lambda: None)
    elif lines._orjson() is None:
        pytest.skip("orjson is not installed")


def test_unusual_texts_parse_as_by_json() -> None:
    check([text.encode() for text in [*NUMBERS, *OTHERS]])
    for number in NUMBERS:
        check([f'{pad}[{number}, {{{pad}"a": {number}}}]'.encode() for pad in ("", " ", "  ", "   ", "    ")])
    for text in (b'"\xff"', b'"\xed\xa0\x80"', '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}"):
        check([b"[1]", text, b"[2]"])


def test_usual_texts_are_parsed_together() -> None:
    texts = [json.dumps({"n": n, "float": 1 / (n + 1), "text": "grüße\u2028" * n}).encode() for n in range(100)]
    values = loads_many(texts)
    assert [None if value is None else json.dumps(value) for value in values] in (
        [], [json.dumps(json.loads(text)) for text in texts]
    )  # fmt: skip


def test_deep_nesting_is_a_value_error() -> None:
    value: Any = loads(b'[{"a":' * 450 + b"1" + b"}]" * 450)
    for _ in range(450):
        value = value[0]["a"]
    assert value == 1
    with pytest.raises(ValueError, match="it is nested too deep"):
        loads(b"[" * 100_000 + b"]" * 100_000)
