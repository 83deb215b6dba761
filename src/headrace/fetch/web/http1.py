"""HTTP/1.1 without I/O: addresses, requests, heads and chunked bodies (RFC 9110 and 9112).

Heads are parsed strictly: ambiguous input is refused, as a proxy may understand it differently. All functions take
linear time, and raise ValueError for malformed input.
"""

from __future__ import annotations

import base64
import re
import string
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from headrace.errors import AccessDeniedError, ObjectChangedError, ObjectMissingError, StorageError, ThrottledError

HEAD_BYTES = 64 * 1024
_HEADERS = 256
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ADDRESS = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE | re.DOTALL)
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_AUTHORITY = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*\.?)(?::([0-9]{{1,5}}))?")
_PORTS = {"http": 80, "https": 443}
_AS_IT_STANDS = re.compile(r"[!-~]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(_WORD)
_UNSENDABLE = re.compile(r"[^\t -~\x80-\xff]")
_HEAD = re.compile(rf"HTTP/1\.([01]) ([1-9][0-9]{{2}})(?: [^\r\n\0]*)?((?:\r\n{_WORD}:[^\r\n\0]*)*)")
# Ambiguous if repeated with another value.
_SINGLE = frozenset({"content-length", "content-range", "content-encoding", "etag", "location"})
_LENGTH = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")


class WebOrigin(NamedTuple):
    scheme: str
    host: str
    port: int
    authority: str


class Target(NamedTuple):
    """A parsed address. `path` is for the request line, `authorization` is from the userinfo."""

    origin: WebOrigin
    path: str
    authorization: str | None


class Head(NamedTuple):
    """The head of an answer.

    Attributes:
        headers: By lower-case name. Repeated values are joined by commas.
        length: Bytes of the body. None if it is chunked or extends to the connection's end.
        keeps_alive: True if another request may follow on the connection.
    """

    status: int
    headers: dict[str, str]
    length: int | None
    is_chunked: bool
    keeps_alive: bool


def target_of(url: str) -> Target:
    """Parse `url`. Path and query stay unchanged, except that invalid characters are escaped."""
    match = _ADDRESS.fullmatch(url)
    if match is None or "\\" in match[2]:  # some clients take it for a slash
        raise ValueError("it is no http or https address")
    userinfo, at, authority = match[2].rpartition("@")
    path = match[3] if match[3].startswith("/") else f"/{match[3]}"
    if not _AS_IT_STANDS.fullmatch(path):
        if _CONTROL.search(path):
            raise ValueError("its path has control characters")
        path = quote(path, safe=string.punctuation)
    authorization = None
    if at:
        user, _, password = userinfo.partition(":")
        pair = b"%b:%b" % (unquote_to_bytes(user), unquote_to_bytes(password))
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    return Target(_origin(match[1].lower(), authority), path, authorization)


@lru_cache(256)
def _origin(scheme: str, authority: str) -> WebOrigin:
    match = _AUTHORITY.fullmatch(authority if authority.isascii() else authority.encode("idna").decode())
    if match is None or not 0 < int(match[2] or _PORTS[scheme]) < 65536:
        raise ValueError("its host and port cannot be read")
    host, port = match[1].lower(), int(match[2] or _PORTS[scheme])
    return WebOrigin(scheme, host.strip("[]"), port, host if port == _PORTS[scheme] else f"{host}:{port}")


def request(path: str, fields: Mapping[str, str], headers: Mapping[str, str]) -> bytes:
    """Build a GET with `fields` and the user's `headers`, which win on equal names."""
    if headers:
        theirs = {name.lower() for name in headers}
        fields = {**{name: fields[name] for name in fields if name.lower() not in theirs}, **headers}
    if not all(map(_NAME.fullmatch, headers)) or _UNSENDABLE.search("".join(fields.values())):
        # Values are not shown, as they may be secrets.
        raise ValueError(f"one of the headers {', '.join(map(repr, fields))} has characters that cannot be sent")
    lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def head_end(data: bytearray, searched: int, stop: int) -> int:
    """Return the end of the head at the start of `data`, with its empty line; -1: incomplete.

    The first `searched` bytes were searched earlier.

    Raises:
        ValueError: this cannot become a head.
    """
    at = data.find(b"\r\n\r\n", max(0, searched - 3), stop)
    if at >= 0 and at + 4 <= HEAD_BYTES:
        return at + 4
    begin = b"HTTP/1."
    if data[: min(stop, len(begin))] != begin[:stop]:
        raise ValueError("it does not begin as HTTP does")
    if stop >= HEAD_BYTES:
        raise ValueError(f"its head is longer than {HEAD_BYTES} bytes")
    if data.count(b"\n", searched, stop) != data.count(b"\r\n", max(0, searched - 1), stop):
        raise ValueError("a line of its head ends without a carriage return")
    return -1


def parse_head(data: bytes | bytearray) -> Head:
    match = _HEAD.fullmatch(data.decode("latin-1"), 0, len(data) - 4)
    if match is None or data[-4:] != b"\r\n\r\n":
        raise ValueError("its head is malformed")
    lines = match[3].split("\r\n")
    if len(lines) > _HEADERS + 1:
        raise ValueError(f"its head has more than {_HEADERS} fields")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name not in headers:
            headers[name] = value
        elif name not in _SINGLE:
            headers[name] += f", {value}"
        elif headers[name] != value:
            raise ValueError(f"it has two different fields {name}")
    return _framed(int(match[2]), headers, is_new=match[1] == "1")


def _framed(status: int, headers: dict[str, str], *, is_new: bool) -> Head:
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    keeps_alive = is_new and ("connection" not in headers or "close" not in headers["connection"].lower())
    if length is not None and not _LENGTH.fullmatch(length):
        raise ValueError("its Content-Length is no number")
    if coding is not None and (length is not None or not is_new or coding.lower() != "chunked"):
        raise ValueError("its Transfer-Encoding cannot be read, or stands beside a Content-Length")
    if status < 200 or status in (204, 304):
        return Head(status, headers, 0, False, keeps_alive)
    if length is not None:
        return Head(status, headers, int(length), False, keeps_alive)
    return Head(status, headers, None, coding is not None, keeps_alive and coding is not None)


class ContentRange(NamedTuple):
    start: int | None
    stop: int | None
    size: int | None


def content_range(value: str) -> ContentRange:
    match = _RANGE.fullmatch(value)
    if match is None:
        raise ValueError(f"its Content-Range {value[:80]!r} cannot be read")
    size = None if match[3] == "*" else int(match[3])
    if match[1] is None:
        return ContentRange(None, None, size)
    start, last = int(match[1]), int(match[2])
    if start > last or (size is not None and last >= size):
        raise ValueError(f"its Content-Range {value[:80]!r} is impossible")
    return ContentRange(start, last + 1, size)


def retry_after_s(value: str, now_s: float) -> float | None:
    """Return the seconds of a Retry-After, or None. `now_s`: seconds since 1970, for a date."""
    if _SECONDS.fullmatch(value):
        return float(value)
    try:
        date = parsedate_to_datetime(value[:64])
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now_s)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


class Chunks:
    """Incremental decoder of a chunked body. `is_done` is True after its end and trailers."""

    _LINE_BYTES = 4096
    _WINDOW = 128  # bytes searched for a line's end at a time, as most lines are short

    def __init__(self) -> None:
        self.is_done = False
        self._left = 0  # bytes left of the chunk
        self._line = b""  # the incomplete line
        self._awaits = "size"
        self._trailers = 0

    def feed(self, data: memoryview, out: memoryview) -> tuple[int, int]:
        """Decode `data` into `out`, as far as it fits. Return the numbers of bytes used and written."""
        taken = given = 0
        while taken < len(data) and not self.is_done:
            if not self._left:
                taken += self._take_line(bytes(data[taken : taken + self._WINDOW]))
                continue
            count = min(self._left, len(data) - taken, len(out) - given)
            if not count:
                break
            out[given : given + count] = data[taken : taken + count]
            taken, given, self._left = taken + count, given + count, self._left - count
        return taken, given

    def _take_line(self, data: bytes) -> int:
        taken = data.find(b"\n") + 1 or len(data)
        self._line += data[:taken]
        if len(self._line) > self._LINE_BYTES:
            raise ValueError("a line between its chunks is too long")
        if self._line.endswith(b"\n"):
            line, self._line = self._line, b""
            self._end_line(line)
        return taken

    def _end_line(self, line: bytes) -> None:
        if self._awaits == "size":
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise ValueError("the size of a chunk cannot be read")
            self._left = int(match[1], 16)
            self._awaits = "end" if self._left else "trailer"
        elif self._awaits == "end":
            if line != b"\r\n":
                raise ValueError("a chunk is longer than its size")
            self._awaits = "size"
        else:
            self._trailers += 1
            self.is_done = line == b"\r\n"
            if not line.endswith(b"\r\n") or self._trailers > _HEADERS:
                raise ValueError("what follows its last chunk cannot be read")


_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_THROTTLES = frozenset({"SlowDown", "ServerBusy", "RequestLimitExceeded", "Throttling", "ThrottlingException"})
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
# Values of Content-Encoding that change no byte. Uploads in signed chunks leave aws-chunked.
_PLAIN_ENCODINGS = frozenset({"", "identity", "aws-chunked"})


def code_in(text: str) -> str | None:
    """Return the code in an S3 error body, the only part of the body that is ever shown."""
    match = _CODE.search(text)
    return match[1] if match else None


def is_plain(encoding: str) -> bool:
    """True if a body with this Content-Encoding has the object's bytes as stored."""
    return all(part.strip().lower() in _PLAIN_ENCODINGS for part in encoding.split(","))


def encoded(encoding: str) -> str:
    return (
        f"its body has Content-Encoding {encoding[:40]!r}, so no range of it can be read: store the object without "
        "this header, and under a name that ends in .gz if its bytes are compressed"
    )


def refusal(
    status: int, code: str | None, *, url: str, retry_after_s: float | None = None, hint: str = ""
) -> StorageError:
    kind, reason = _meaning(status, code)
    said = f"{status} {code}" if code else f"{status}"
    return kind(f"{reason}: {said}{hint}", url=url, status=status, retry_after_s=retry_after_s)


def _meaning(status: int, code: str | None) -> tuple[type[StorageError], str]:
    if status in (404, 410):
        return ObjectMissingError, "no such object"
    if status in (401, 403) or code in _EXPIRED:
        return AccessDeniedError, "the store refused the read"
    if status == 412:
        return ObjectChangedError, (
            "the object no longer has the ETag it had: it was replaced, or mirrors with ETags of their own answer for "
            "one address; then name one mirror"
        )
    if status in (429, 503) or code in _THROTTLES:
        return ThrottledError, "the store asks for fewer requests"
    return StorageError, "the store answered"
