"""Lines of JSON, and errors of other data. The fuzz target has the finding of lines."""

from __future__ import annotations

from typing import Any

import pytest
from builders.stored import put

import headrace as hr
from headrace.formats.format import Block
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.lines import JSON_LINES, JsonLineScanner


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
