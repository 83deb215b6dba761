"""Lines of JSON and records of CSV and TSV: options, what other writers write, and damage."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.stored import put, rows

import headrace as hr
from headrace.formats import lines
from headrace.formats.delimited import CSV, TSV, Csv, Tsv
from headrace.formats.format import Block
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.lines import JSON_LINES, JsonLineScanner, loads, loads_many

WIDE = 10**5


def read(data: bytes | str, form: Csv = CSV, limits: Limits = DEFAULTS) -> list[dict[str, Any]]:
    place = put(data.encode() if isinstance(data, str) else data, "0.csv")
    return rows(hr.stream(place, format=form, limits=limits, index=None))


def test_options_describe_the_layout() -> None:
    assert read("a;b\n'1;';2\n", Csv(delimiter=";", quote="'")) == [{"a": "1;", "b": "2"}]
    assert read('a\tb\n"1\t2\n', Tsv(quote=None)) == [{"a": '"1', "b": "2"}]
    assert read("1,2\n", Csv(header=False, columns=["x", "y"])) == [{"x": "1", "y": "2"}]
    assert read("\ufeffx,y\n1,2", Csv(columns=["x", "y"])) == [{"x": "1", "y": "2"}]
    assert read('x,y\n5" disk,"a"b"\n"q" "r",3', CSV) == [{"x": '5" disk', "y": 'ab"'}, {"x": 'q "r"', "y": "3"}]
    assert read('x,y\n5" disk,1\n2,"3"\n') == [{"x": '5" disk', "y": "1"}, {"x": "2", "y": "3"}]
    assert [form.name for form in (CSV, TSV, Csv(types={"n": int}))] == ["csv", "tsv", "csv"]
    assert Csv(header=False, columns=["x"]).name == "csv(header=False, columns=('x',))"
    assert pickle.loads(pickle.dumps(Tsv(quote=None))).name == "tsv(quote=None)"


@pytest.mark.parametrize(("options", "says"), [
    ({"delimiter": ";;"}, "one ASCII character"), ({"delimiter": "ü"}, "one ASCII"), ({"quote": "\n"}, "does not end"),
    ({"quote": ","}, "different characters"), ({"header": False}, "needs the names"), ({"columns": []}, "no columns"),
    ({"columns": ["a", "a"]}, "twice"), ({"columns": ["__a"]}, "taken"),
    ({"columns": ["a"], "types": {"b": int}}, "no such columns"),
])  # fmt: skip
def test_invalid_option_is_an_option_error(options: Any, says: str) -> None:
    with pytest.raises(hr.OptionError, match=says):
        Csv(**options)


def test_types_convert_values() -> None:
    form = Csv(types={"i": int, "f": float, "b": bool, "c": lambda text: text.split()})
    (row,) = read("i,f,b,c,s\n 7,1e3,False,x y,1\n", form)
    assert row == {"i": 7, "f": 1000.0, "b": False, "c": ["x", "y"], "s": "1"}
    for made, text in ((int, "1_0"), (int, "٣"), (int, ""), (float, "1_0"), (float, "x"), (bool, "no"), (bool, "")):
        with pytest.raises(hr.DecodeError, match="column 'n', "):
            read(f'n,m\n"{text}",\n', Csv(types={"n": made}))
    with pytest.raises(hr.DecodeError, match="no column 'm'"):
        read("n\n1\n", Csv(types={"m": int}))
    with pytest.raises(hr.errors.FormatError, match="columns="):
        read("a,c\n1,2\n", Csv(columns=["a", "b"]))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "kind", "says"), [
    (b"a,b\n1,2\n\n3\n", hr.DecodeError, "sample '4' .* has 1 fields, and there are 2 columns"),
    (b"a,b\n1,2,3\n", hr.DecodeError, "sample '2' .* has 3 fields"),
    (b"a,b\n1,\0\n", hr.DecodeError, "sample '2' .* NUL"),
    (b"a,b\n1,\xfc\n", hr.DecodeError, "sample '2' .*utf-8"),
    (b"a,b\n1,2\r3,4\r\n", hr.DecodeError, "sample '2' .* a line ends in a field without quotes"),
    (b"a,b\n1,2\n3,4\r\r", hr.DecodeError, "sample '3' .* a line ends in a field without quotes"),
    (b"a,b\n3,4\r\r\n1,2\n", hr.DecodeError, "sample '2' .* a line ends in a field without quotes"),
    (b'a,b\n1,2\n3,"4\n5,6\n', hr.errors.FormatError, "line 3, byte 8"),
    (b'a,"b\n1,2\n', hr.errors.FormatError, "line 1, byte 0"),
    (b"a,b\r1,2\r", hr.errors.FormatError, "a line ends in a field without quotes .*line 1"),
    (b"a,\xfc\n1,2\n", hr.errors.FormatError, "header cannot be used"),
    (b"a,\0\n1,2\n", hr.errors.FormatError, "NUL"), (b"a,a\n1,2\n", hr.errors.FormatError, "'a' is there twice"),
    (b"a,__b\n1,2\n", hr.errors.FormatError, "'__b' begins with"),
    ("a,b\n1,2\n".encode("utf-16"), hr.errors.FormatError, "UTF-16"), (b"\x1f\x8b\x08", hr.errors.FormatError, "gzip"),
    (b"<!DOCTYPE html>\n", hr.errors.FormatError, "an HTML page"),
    (b",".join(b"%d" % n for n in range(WIDE)) + b"\n", hr.errors.FormatError, "100000 columns, over the limit"),
])  # fmt: skip
def test_damage_is_an_error_with_its_location(data: bytes, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        read(data)
    assert type(caught.value) is kind


@pytest.mark.parametrize("way", ["streamed", "twice", "packed", "by number", "shuffled", "one by one"])
def test_error_of_a_row_has_its_offset(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    damaged = b'a,b\n"x\ny",2\n3\n5,6\n'
    ending = ".gz" if way == "packed" else ""
    bodies = (b"a,b\n1,2\n3,4\n", damaged)
    urls = [put(gzip.compress(body) if ending else body, f"0.csv{ending}") for body in bodies]
    index = None if way in ("streamed", "twice", "packed") else "build"
    data = hr.stream(urls, index=index)
    if way == "twice":
        data = data.shuffle().repeat(2)
    elif way == "shuffled":
        data = data.shuffle("global")
    with pytest.raises(hr.DecodeError, match=r"sample '4' .* \(its sample begins at byte 12\)") as caught:
        if way == "one by one":
            data[3]
        else:
            list(data)
    assert (caught.value.key, caught.value.offset) == ("4", 12)
    assert pickle.loads(pickle.dumps(caught.value)).offset == 12


@pytest.mark.slow
def test_sizes_are_compared_with_limits() -> None:
    wide = b",".join(b"%d" % n for n in range(WIDE)) + b"\n"
    (row,) = read(wide * 2, limits=Limits(fields=WIDE))
    assert row == {str(n): str(n) for n in range(WIDE)}
    low: Callable[[str], Any] = lambda text: read(text, limits=Limits(member_bytes=100, header_bytes=50))
    with pytest.raises(hr.errors.LimitError, match=r"the record has .*100.*line 3, byte 8"):
        low("a,b\n1,2\n" + "x" * 200 + ",3\n")
    with pytest.raises(hr.errors.FormatError, match="over the limit of 50"):
        low("a" * 80 + ",b\n1,2\n")
    assert read("a,b\n" + "x" * 200_000 + ',"' + "y" * 200_000 + '"\n')[0]["b"] == "y" * 200_000


def scan(data: bytes, piece: int, limits: Limits = DEFAULTS) -> tuple[list[tuple[bytes, int, int]], Any]:
    scanner = JsonLineScanner("memory://x/a.jsonl?X-Amz-Signature=secret", limits)
    found: list[tuple[bytes, int, int]] = []
    for start in range(0, len(data), piece):
        rows = scanner.feed(memoryview(data)[start : start + piece], start, start + piece >= len(data))
        found += zip(rows.keys.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
    return found, scanner.error


@pytest.mark.parametrize(("data", "says"), [
    (b"[1]\n", "JSON array"), (b"\n  [\n{}]", "JSON array"), (b"\x1f\x8b\x08" + bytes(90), "gzip"),
    (b"hello", "b'hello'"), (b"PAR1" + bytes(20), "PAR1"), (bytes(2000), "each line must be"),
])  # fmt: skip
def test_object_of_another_kind_is_an_error_that_names_it(data: bytes, says: str) -> None:
    found, error = scan(data, 512)
    assert found == []
    assert error is not None
    assert says in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize("piece", [512, 10**6])
def test_line_over_the_limit_ends_the_object_after_the_lines_before_it(piece: int) -> None:
    data = b'{}\n\n{"n": 1}\n{"a": "' + b"x" * 5000 + b'"}\n{}\n'
    found, error = scan(data, piece, Limits(member_bytes=2000))
    assert found == [(b"1", 0, 2), (b"3", 4, 8)]
    assert type(error) is hr.errors.LimitError
    assert (error.key, error.offset) == ("4", 13)
    assert "line 4, byte 13" in str(error)


def opened(line: bytes) -> Any:
    return JSON_LINES.open_block(Block("u", ("line",)), [line])[0]


@pytest.mark.parametrize("line", [
    b"", b"{", b"[1]", b"3", b"null", b'"a"', b'{"a": "\xff"}', b"{} {}", b"{'a': 1}", b'{"a":' * 99999, b"{\0}",
    '{"a": 1}'.encode("utf-16"),
])  # fmt: skip
def test_line_that_is_no_object_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        opened(line)


def test_damaged_line_is_an_error_with_its_place_or_is_skipped() -> None:
    url = put(b'{"n": 1}\n\n{"n": 2\n{"__n": 3}\n{"n": 4}', "0.jsonl")
    data = hr.stream(url, index=None)
    with pytest.raises(hr.DecodeError, match=f"sample '3' of {url} does not open as jsonl"):
        list(data)
    with hr.DataLoader(data, batch_size=None, errors=hr.Skip()) as loader:
        assert [sample["n"] for sample in loader] == [1, 4]
        assert loader.stats().skipped == 2


def test_sniff_distinguishes_lines_from_one_object() -> None:
    assert JSON_LINES.sniff("x", b'{"a": 1}\n{"a"') > 0.5
    assert 0 < JSON_LINES.sniff("x", b'{"a": "' + b"x" * 5000) < 0.5
    assert JSON_LINES.sniff("x", b'{\n  "a": 1\n}') == JSON_LINES.sniff("x", b"[1]\n") == 0
    assert [sample["n"] for sample in hr.stream(put(b'{"n": 1}\n{"n": 2}\n', "no_suffix.data"))] == [1, 2]


def test_object_of_unknown_format_is_refused() -> None:
    for url in (put(b"\0" * 9000, "0.bin"), "memory://jsonl/missing.bin", "memory://jsonl/missing"):
        with pytest.raises(hr.OptionError, match="format"):
            hr.stream(url)


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


@pytest.fixture(params=["with orjson", "without"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(lines, "_orjson", lambda: None)
    elif lines._orjson() is None:
        pytest.skip("orjson is not installed")


@pytest.mark.usefixtures("library")
def test_unusual_texts_parse_as_by_json() -> None:
    check([text.encode() for text in [*NUMBERS, *OTHERS]])
    for number in NUMBERS:
        check([f'{pad}[{number}, {{{pad}"a": {number}}}]'.encode() for pad in ("", " ", "  ", "   ", "    ")])
    for text in (b'"\xff"', b'"\xed\xa0\x80"', '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}"):
        check([b"[1]", text, b"[2]"])


@pytest.mark.usefixtures("library")
def test_usual_texts_are_parsed_together() -> None:
    texts = [json.dumps({"n": n, "float": 1 / (n + 1), "text": "grüße\u2028" * n}).encode() for n in range(100)]
    values = loads_many(texts)
    assert [None if value is None else json.dumps(value) for value in values] in (
        [], [json.dumps(json.loads(text)) for text in texts]
    )  # fmt: skip


@pytest.mark.usefixtures("library")
def test_deep_nesting_is_a_value_error() -> None:
    value: Any = loads(b'[{"a":' * 450 + b"1" + b"}]" * 450)
    for _ in range(450):
        value = value[0]["a"]
    assert value == 1
    with pytest.raises(ValueError, match="it is nested too deep"):
        loads(b"[" * 100_000 + b"]" * 100_000)
