"""HTTP/1.1 is parsed strictly, equally for any cuts of the data; anything else is a ValueError."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.fetch.web.http1 import (
    HEAD_BYTES,
    Chunks,
    content_range,
    head_end,
    parse_head,
    request,
    retry_after_s,
    target_of,
)

USUAL = (
    b"HTTP/1.1 206 Partial Content\r\nServer: nginx\r\nContent-Length: 100\r\nConnection: keep-alive\r\n"
    b'ETag: "a:b"\r\nContent-Range: bytes 0-99/500\r\n\r\n'
)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def head_of(data: bytes, boundaries: tuple[int, ...] = ()) -> tuple[object, int]:
    """The head and its length, where `data` came in parts that end at `boundaries`."""
    searched = 0
    for stop in (*boundaries, len(data)):
        end = head_end(bytearray(data), searched, stop)
        if end >= 0:
            return parse_head(data[:end]), end
        searched = stop
    return None, -1


@pytest.mark.parametrize(("head", "length", "is_chunked", "keeps_alive"), [
    (USUAL, 100, False, True),
    (CHUNKED, None, True, True),
    (b"HTTP/1.1 200 OK\r\n\r\n", None, False, False),
    (b"HTTP/1.1 204 No Content\r\n\r\n", 0, False, True),
    (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", 0, False, True),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\nConnection: keep-alive\r\n\r\n", 7, False, False),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: Close\r\n\r\n", 7, False, False),
    (b"HTTP/1.1 200\r\nContent-Length:7\r\ncontent-length:\t7 \r\n\r\n", 7, False, True),
])  # fmt: skip
def test_head_frames_the_body(head: bytes, length: int | None, is_chunked: bool, keeps_alive: bool) -> None:
    parsed = parse_head(head)
    assert (parsed.length, parsed.is_chunked, parsed.keeps_alive) == (length, is_chunked, keeps_alive)


def test_head_has_names_in_lower_case_and_joins_what_is_repeated() -> None:
    head = parse_head(b'HTTP/1.1 200 OK\r\nVARY: a\r\nEtag:  W/"x" \r\nVary: b\r\nEmpty:\r\nLatin: \xe9\r\n\r\n')
    assert head.headers == {"vary": "a, b", "etag": 'W/"x"', "empty": "", "latin": "é"}


def response(*lines: bytes, status: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([status, *lines, b"", b""])


@pytest.mark.parametrize("head", [
    *(response(status=status) for status in [
        b"HTTP/2 200 OK", b"HTTP/1.2 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 2000 OK", b"HTTP/1.1 \xb2\xb2\xb2 OK",
        b"HTTP/1.1  200 OK",
    ]),
    *map(response, [
        b"Name : value", b"Name: a\r\n folded", b"no colon", b": no name", b"Name: a\0b", b"Name: a\nInjected: b",
        b"Name: a\rb", b"Content-Length: 5, 5", b"Content-Length: -5", b"Content-Length: +5", b"Content-Length: 0x5",
        b"Content-Length:", b"Content-Length: " + b"9" * 5000, b"Transfer-Encoding: gzip, chunked",
        b"a: " + b"b" * HEAD_BYTES,
    ]),
    response(b"Content-Length: 5", b"Content-Length: 6"),
    response(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    response(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    response(b"Transfer-Encoding: chunked", status=b"HTTP/1.0 200 OK"),
    response(b"Content-Range: bytes 0-1/2", b"Content-Range: bytes 1-2/3", status=b"HTTP/1.1 206 OK"),
    response(*[b"a: b"] * 257),
    b"HTTP/1.1 200 OK\n\n", b"<html>", b"0" * 20,
])  # fmt: skip
def test_ambiguous_head_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match="it"):
        head_of(head)


@pytest.mark.parametrize("data", [b"SSH-2.0", b"\x16\x03", b"HTTP/2", b"HTTP/1.1 200 OK\nServer: x\n"])
def test_data_that_is_no_head_is_refused_before_it_ends(data: bytes) -> None:
    with pytest.raises(ValueError, match="it"):
        head_end(bytearray(data), 0, len(data))


@given(st.lists(st.integers(0, len(USUAL) + 10), max_size=6))
def test_head_does_not_depend_on_how_data_is_split(boundaries: list[int]) -> None:
    assert head_of(USUAL + b"0123456789", tuple(sorted(boundaries))) == head_of(USUAL)


@given(st.binary(max_size=300), st.integers(0, len(USUAL)), st.integers(0, 20))
def test_garbage_in_a_head_is_a_value_error_or_a_head(garbage: bytes, at: int, removed: int) -> None:
    data = USUAL[:at] + garbage + USUAL[at + removed :]
    try:
        head, end = head_of(data)
    except ValueError:
        return
    assert end == -1 or head is not None


def unchunked(data: bytes, boundaries: list[int], room: int) -> tuple[bytes, int, bool]:
    chunks, body, at = Chunks(), b"", 0
    for stop in [*sorted(boundaries), len(data)]:
        while at < min(stop, len(data)) and not chunks.is_done:
            out = bytearray(room)
            taken, given_ = chunks.feed(memoryview(data)[at : min(stop, len(data))], memoryview(out))
            assert taken or given_, "no progress"
            body, at = body + out[:given_], at + taken
    return body, at, chunks.is_done


@given(
    st.lists(st.binary(min_size=1, max_size=400), max_size=8),
    st.sampled_from([b"", b";name=value", b' ; a="b"']),
    st.sampled_from([b"", b"Trailer: x\r\n", b"A: b\r\nC: d\r\n"]),
    st.lists(st.integers(0, 3000), max_size=12),
    st.integers(1, 500),
)
def test_chunks_do_not_depend_on_how_data_is_split(
    pieces: list[bytes], extension: bytes, trailers: bytes, boundaries: list[int], room: int
) -> None:
    coded = b"".join(b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces) + b"0\r\n" + trailers + b"\r\n"
    assert unchunked(coded + b"next", boundaries, room) == (b"".join(pieces), len(coded), True)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5), st.integers(1, 50))
@example(b"5\r\nhello\r\n0\r\n\r\n", [3], 2)
def test_garbage_in_chunks_is_a_value_error_or_a_body(data: bytes, boundaries: list[int], room: int) -> None:
    try:
        whole = unchunked(data, [], 1000)
    except ValueError:
        with pytest.raises(ValueError, match="chunk"):
            unchunked(data, boundaries, room)
    else:
        assert unchunked(data, boundaries, room) == whole


@pytest.mark.parametrize("coded", [
    b"g\r\n", b"-5\r\n", b"0x5\r\n", b"\r\n", b"5\nhello", b"5\r\nhello!\r\n", b"5\r\nhello\n", b"f" * 16 + b"\r\n",
    b"5;" + b"e" * 5000 + b"\r\n", b"0\r\nTrailer: x\n", b"0\r\n" + b"a: b\r\n" * 300,
])  # fmt: skip
def test_chunks_that_cannot_be_read_are_refused(coded: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        unchunked(coded, [], 100)


@pytest.mark.parametrize(("value", "expected"), [
    ("bytes 0-99/500", (0, 100, 500)),
    ("Bytes 7-7/*", (7, 8, None)),
    ("bytes */500", (None, None, 500)),
    ("bytes 5-4/500", None),
    ("bytes 0-500/500", None),
    ("bytes=0-99/500", None),
    ("bytes 0-99/500, bytes 0-99/500", None),
    ("bytes 0-9٩/500", None),
    ("lines 0-99/500", None),
    ("", None),
])  # fmt: skip
def test_content_range_is_parsed_or_refused(value: str, expected: tuple[int | None, ...] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="Content-Range"):
            content_range(value)
    else:
        assert content_range(value) == expected


NOW_S = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(("value", "expected"), [
    ("0", 0.0),
    ("120", 120.0),
    ("0.25", 0.25),
    (format_datetime(datetime(2026, 5, 1, 12, 1, tzinfo=UTC), usegmt=True), 60.0),
    ("Fri, 01 May 2026 11:00:00 GMT", 0.0),
    ("Fri, 01 May 2026 12:00:30 -0000", 30.0),
    ("-5", None),
    ("1e9", None),
    ("inf", None),
    ("soon", None),
    ("", None),
])  # fmt: skip
def test_retry_after_is_seconds_or_a_date(value: str, expected: float | None) -> None:
    assert retry_after_s(value, NOW_S) == expected


@pytest.mark.slow
@given(st.text(max_size=80))
def test_retry_after_never_raises(value: str) -> None:
    seconds = retry_after_s(value, NOW_S)
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(("url", "origin", "authority", "path"), [
    ("http://host/a/b?x=%2F&y#part", ("http", "host", 80), "host", "/a/b?x=%2F&y"),
    ("HTTPS://Host:443//a/../b/", ("https", "host", 443), "host", "//a/../b/"),
    ("http://host:8080", ("http", "host", 8080), "host:8080", "/"),
    ("http://host?x", ("http", "host", 80), "host", "/?x"),
    ("http://[::1]:81/", ("http", "::1", 81), "[::1]:81", "/"),
    ("http://user:p%40ss@host/a@b", ("http", "host", 80), "host", "/a@b"),
    ("http://host/a b/ü%20{}", ("http", "host", 80), "host", "/a%20b/%C3%BC%20{}"),
    ("http://bücher.example/", ("http", "xn--bcher-kva.example", 80), "xn--bcher-kva.example", "/"),
])  # fmt: skip
def test_address_is_sent_unchanged(url: str, origin: tuple[str, str, int], authority: str, path: str) -> None:
    target = target_of(url)
    assert (target.origin[:3], target.origin.authority, target.path) == (origin, authority, path)
    assert target.authorization == ("Basic dXNlcjpwQHNz" if "user" in url else None)


@pytest.mark.parametrize("url", [
    "ftp://host/", "//host/a", "", "http:///a", "http://host:0/", "http://host:99999/", "http://ho st/", "http://a\\@b/",
    "http://[::1/", "http://a..b/", f"http://{'a' * 64}/", "http://host/a\r\nX: y", "http://host/\0", "http://host\n/",
    "http://host/\ud800",
])  # fmt: skip
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"it|surrogates"):
        target_of(url)


def test_user_headers_replace_default_headers() -> None:
    assert request("/a", {"Host": "h", "User-Agent": "headrace"}, {"user-agent": "mine", "X-Key": "k\xe9y"}) == (
        b"GET /a HTTP/1.1\r\nHost: h\r\nuser-agent: mine\r\nX-Key: k\xe9y\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("X", "se\r\nA: b"), ("X", "se\ncret"), ("X", "seł"), ("X:", "se"), ("", "se")]
)
def test_header_injection_is_refused_without_its_value(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent") as caught:
        request("/", {}, {name: value})
    assert "se" not in str(caught.value).replace("sent", "")
