"""The correct answer to a request, and the faults, by name: functions that change it."""

from __future__ import annotations

import gzip
import html
import math
import random
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from hashlib import sha256
from http.client import responses
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from headrace.types import Buffer


@dataclass(slots=True)
class Request:
    """A received request.

    Attributes:
        headers: By lower-case name.
        elsewhere: True if it came to the second listener.
        attempt: Number of requests for the same object and range so far, with this one.
        is_early: True if it came before the time of a Retry-After.
        faults: Faults of its answer.
    """

    method: str
    target: str
    headers: dict[str, str]
    elsewhere: bool = False
    attempt: int = 0
    is_early: bool = False
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.target).path)[1:]

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def is_listing(self) -> bool:
        return "list-type" in self.query


@dataclass(slots=True)
class Plan:
    """The answer to send.

    Attributes:
        whole, etag: The object's bytes and version. The ETag is empty if there is no object.
        start: Position of `body` in the object.
        instead: "reset", "close" or "hang" (for `delay_s`, then close) instead of an answer.
        raw: Bytes instead of an answer.
        delay_s, head_stall_s: Seconds of silence before the head, and in the middle of it.
        stops: (byte of the body, "stall" | "reset" | "close", seconds).
        bytes_per_s: Rate of the body. 0: unlimited.
        framing: "length", "chunked" or "close".
        announced: The Content-Length, if not the body's length.
        ends: True if the connection is closed after the answer.
        hold_s: Seconds in which no request for this object and range may come.
    """

    request: Request
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Buffer = b""
    whole: Buffer = b""
    etag: str = ""
    start: int = 0
    rng: random.Random = field(default_factory=random.Random)
    elsewhere_url: str = ""
    interim: bytes = b""
    instead: str = ""
    raw: bytes = b""
    delay_s: float = 0.0
    head_stall_s: float = 0.0
    stops: list[tuple[int, str, float]] = field(default_factory=list)
    bytes_per_s: float = 0.0
    framing: str = "length"
    announced: int | None = None
    ends: bool = False
    hold_s: float = 0.0

    def refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        """Answer with a status and an S3 error body, without the object's headers."""
        name = html.escape(self.request.name)
        self.status, self.headers = status, {"Content-Type": "application/xml", **(headers or {})}
        self.body = f"<Error><Code>{code}</Code><Message>injected</Message><Key>{name}</Key></Error>".encode()
        self.stops, self.announced = [], None

    def serve(self, data: Buffer, etag: str) -> None:
        """Answer with the requested bytes of an object, if the request's conditions are met."""
        headers, size = self.request.headers, len(data)
        self.whole, self.etag = data, etag
        if headers.get("if-match", etag) not in (etag, "*") or ("if-match" in headers and etag.startswith("W/")):
            return self.refuse(412, "PreconditionFailed")
        self.headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        self.status, self.start, self.body = 200, 0, data
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
        if asked is None or asked[0] == "bytes=-" or headers.get("if-range", etag) != etag:
            return None
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(int(last) + 1, size) if first and last else size
        if start >= stop:
            return self.refuse(416, "InvalidRange", {"Content-Range": f"bytes */{size}"})
        self.status, self.start, self.body = 206, start, memoryview(data)[start:stop]
        self.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return None

    def list_bucket(self, objects: Mapping[str, Buffer], mode: str) -> None:
        """Answer with one page of the bucket's names. `mode` is the fault's, or empty."""
        bucket, query = self.request.name.strip("/"), self.request.query
        names = sorted(name.removeprefix(f"{bucket}/") for name in objects if name.startswith(f"{bucket}/"))
        if not names:
            return self.refuse(404, "NoSuchBucket")
        token = query.get("continuation-token", "")
        mark = urlsafe_b64decode(token).decode()[1:] if token else query.get("start-after", "")
        entries = dict(_entries(names, query.get("prefix", ""), query.get("delimiter", "")))
        left = [entry for entry in entries if entry > mark or (mode == "dup" and token and entry == mark)]
        page = [] if mode == "emptypage" and not token else left[: min(1000, int(query.get("max-keys", "1000")))]
        more, last = len(left) > len(page), page[-1] if page else mark
        if mode == "loop":
            more, last = True, mark
        spell = quote if query.get("encoding-type") == "url" else html.escape
        lines = [f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            following = urlsafe_b64encode(f"/{last}".encode()).decode()
            lines.append(f"<NextContinuationToken>{following}</NextContinuationToken>")
        for entry in page:
            if entries[entry]:
                lines.append(f"<CommonPrefixes><Prefix>{spell(entry)}</Prefix></CommonPrefixes>")
                continue
            data = objects[f"{bucket}/{entry}"]
            about = f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>{len(data)}</Size>"
            lines.append(f"<Contents><Key>{spell(entry)}</Key>{about}</Contents>")
        self.headers["Content-Type"] = "application/xml"
        self.body = f"<ListBucketResult>{''.join(lines)}</ListBucketResult>".encode()
        return None


def _entries(names: list[str], prefix: str, delimiter: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a listing, and True if it is a common prefix."""
    for name in names:
        head, found, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
        if name.startswith(prefix):
            yield (prefix + head + delimiter, True) if found else (name, False)


_S3_CODES = {403: "AccessDenied", 404: "NoSuchKey", 416: "InvalidRange", 500: "InternalError", 503: "SlowDown"}


def latency(
    plan: Plan,
    *,
    ms: float = 50,
    dist: Literal["const", "uniform", "exp", "lognormal", "pareto"] = "const",
    sigma: float = 1,
    alpha: float = 1.5,
    max: float = 60_000,  # noqa: A002
) -> None:
    """Late first byte: dist=const|uniform|exp|lognormal|pareto, ms=, sigma=, alpha=, max=."""
    late_ms = {
        "const": lambda: ms,
        "uniform": lambda: plan.rng.uniform(0, 2 * ms),
        "exp": lambda: plan.rng.expovariate(1 / ms),
        "lognormal": lambda: ms * math.exp(plan.rng.gauss(0, sigma)),
        "pareto": lambda: ms * plan.rng.paretovariate(alpha),
    }[dist]()
    plan.delay_s += min(late_ms, max) / 1000


def status(plan: Plan, *, code: int = 500, s3: str = "", retry_after: float | None = None, date: int = 0) -> None:
    """Object status with an S3 error body: code=, s3= (name), retry_after= (s), date=1 (a date)."""
    headers = {}
    if retry_after is not None:
        until = int(time.time() + retry_after)  # a date has no fractions
        headers["Retry-After"] = formatdate(until, usegmt=True) if date else f"{retry_after:g}"
        plan.hold_s = until - time.time() if date else retry_after
    plan.refuse(code, s3 or _S3_CODES.get(code) or responses.get(code, "Unknown").title().replace(" ", ""), headers)


def slowdown(plan: Plan, *, retry_after: float | None = None, date: int = 0) -> None:
    """503 SlowDown: retry_after= seconds, date=1: as a date."""
    status(plan, code=503, retry_after=retry_after, date=date)


def _status(code: int) -> Callable[..., None]:
    def fault(plan: Plan, *, retry_after: float | None = None) -> None:
        status(plan, code=code, retry_after=retry_after)

    fault.__doc__ = f"Status {code} with an S3 error body: retry_after= seconds."
    return fault


def expired(plan: Plan, *, skew: int = 0) -> None:
    """400 ExpiredToken, or with skew=1 403 RequestTimeTooSkewed."""
    status(plan, code=403, s3="RequestTimeTooSkewed") if skew else status(plan, code=400, s3="ExpiredToken")


def reset_pre(plan: Plan) -> None:
    """The connection is reset before any header."""
    plan.instead = "reset"


def close_pre(plan: Plan) -> None:
    """The connection ends before any header."""
    plan.instead = "close"


def hang(plan: Plan, *, s: float = 3600) -> None:
    """No answer for s= seconds, then the connection ends."""
    plan.instead, plan.delay_s = "hang", s


def head_stall(plan: Plan, *, s: float = 5) -> None:
    """Half of the headers, then nothing for s= seconds, then the rest."""
    plan.head_stall_s = s


def reset_body(plan: Plan, *, at: float | None = None) -> None:
    """The connection is reset within the body: at= bytes or, below 1, share of it (random)."""
    _stop(plan, at, "reset")


def close_body(plan: Plan, *, at: float | None = None) -> None:
    """The connection ends within a body of known length: at= as reset_body."""
    _stop(plan, at, "close")


def short_chunked(plan: Plan, *, at: float | None = None) -> None:
    """A chunked body ends before its last chunk: at= as reset_body."""
    plan.framing = "chunked"
    _stop(plan, at, "close")


def chunked(plan: Plan) -> None:
    """A correct chunked body, without a Content-Length."""
    plan.framing = "chunked"


def no_length(plan: Plan, *, at: float | None = None) -> None:
    """The body ends with the connection; with at= it is cut there, which HTTP cannot detect."""
    plan.framing = "close"
    close(plan)
    if at is not None:
        _stop(plan, at, "close")


def len_more(plan: Plan, *, n: int = 10) -> None:
    """The Content-Length is n= larger than the body, then the connection ends."""
    plan.announced = len(plan.body) + n
    close(plan)


def len_less(plan: Plan, *, n: int = 10) -> None:
    """The Content-Length is n= smaller than the body; the rest spoils a reused connection."""
    plan.announced = max(0, len(plan.body) - n)


def ignore_range(plan: Plan) -> None:
    """200 with the whole object, though a range was requested."""
    if plan.status == 206:
        plan.status, plan.start, plan.body = 200, 0, plan.whole
        del plan.headers["Content-Range"]


def wrong_range(plan: Plan, *, mode: Literal["label", "data", "total", "short", "none"] = "label", by: int = 7) -> None:
    """A wrong range: mode=label, data, total (size), short or none (no header), by= bytes."""
    if plan.status != 206:
        return
    first, count, size = plan.start, len(plan.body), len(plan.whole)
    if mode == "none":
        del plan.headers["Content-Range"]
    elif mode == "data":
        shifted = first + by if first + by + count <= size else max(0, first - by)
        plan.body = memoryview(plan.whole)[shifted : shifted + count]
    else:
        first += by * (mode == "label")
        count = max(1, count - by * (mode == "short"))
        plan.body = plan.body[:count]
        plan.headers["Content-Range"] = f"bytes {first}-{first + count - 1}/{size + by * (mode == 'total')}"


def multipart(plan: Plan) -> None:
    """A single range is answered as multipart/byteranges."""
    if plan.status == 206:
        plan.headers["Content-Type"] = "multipart/byteranges; boundary=XX"
        label = b"--XX\r\nContent-Range: " + plan.headers.pop("Content-Range").encode()
        plan.body = b"".join((label, b"\r\n\r\n", plan.body, b"\r\n--XX--\r\n"))


def stall(plan: Plan, *, at: float | None = None, s: float = 5) -> None:
    """Within the body nothing comes for s= seconds, then the rest: at= as reset_body."""
    _stop(plan, at, "stall", s)


def drip(plan: Plan, *, bps: float = 10_000) -> None:
    """The body comes at bps= bytes per second."""
    plan.bytes_per_s = bps


def flip(plan: Plan, *, n: int = 1) -> None:
    """The body has n= bits flipped."""
    changed = bytearray(plan.body)
    for _ in range(n if changed else 0):
        changed[plan.rng.randrange(len(changed))] ^= 1 << plan.rng.randrange(8)
    plan.body = changed


def zeros(plan: Plan, *, n: int = 512) -> None:
    """The body has n= bytes replaced by zeros."""
    changed = bytearray(plan.body)
    count = min(n, len(changed))
    start = plan.rng.randrange(len(changed) - count + 1)
    changed[start : start + count] = bytes(count)
    plan.body = changed


def html200(plan: Plan) -> None:
    """200 with a network's login page instead of the object."""
    plan.refuse(200, "", {"Content-Type": "text/html"})
    plan.body = b"<html><body>Please log in to the network</body></html>"


def replaced(plan: Plan) -> None:
    """The object was replaced: other bytes and another ETag."""
    if plan.etag:
        other = bytes(plan.whole).translate(bytes(255 - n for n in range(256)))
        plan.serve(other, f'"{sha256(plan.etag.encode()).hexdigest()[:16]}"')


def etag(plan: Plan, *, weak: int = 0, none: int = 0) -> None:
    """Another ETag for the same bytes; weak=1: the weak form of the right one; none=1: no ETag."""
    if none:
        plan.headers.pop("ETag", None)
    elif plan.etag:
        plan.serve(plan.whole, f"W/{plan.etag}" if weak else f'"{plan.rng.getrandbits(64):x}"')


def redirect(
    plan: Plan, *, mode: Literal["path", "loop", "other", "file", "meta"] = "path", n: int = 1, code: int = 302
) -> None:
    """A redirect: mode=path (n= hops) | loop | other (second listener) | file | meta, code=."""
    name = plan.request.target.partition("?")[0]
    places = {
        "path": f"{name}?hops={n - 1}",
        "loop": f"{name}?hops=loop",
        "other": f"{plan.elsewhere_url}{name}?hops=0",
        "file": "file:///etc/passwd",
        "meta": "http://169.254.169.254/latest/meta-data/",
    }
    plan.refuse(code, "TemporaryRedirect", {"Location": places[mode]})


def gzipped(plan: Plan, *, hide: int = 0) -> None:
    """A proxy compresses the body; hide=1: without the header."""
    plan.body = gzip.compress(plan.body, 1, mtime=0)
    if not hide:
        plan.headers["Content-Encoding"] = "gzip"


def gzbomb(plan: Plan, *, mb: int = 64) -> None:
    """A compressed body that is mb= MiB of zeros."""
    plan.body, plan.headers["Content-Encoding"] = _bomb(mb), "gzip"


def silent_close(plan: Plan) -> None:
    """A correct answer; then the connection closes without notice."""
    plan.ends = True


def close(plan: Plan) -> None:
    """A correct answer with Connection: close."""
    plan.ends, plan.headers["Connection"] = True, "close"


def interim(plan: Plan) -> None:
    """103 Early Hints before the answer."""
    plan.interim = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"


def bad_head(plan: Plan, *, mode: Literal["garbage", "status", "nul", "long"] = "garbage", n: int = 65_536) -> None:
    """Invalid headers: mode=garbage | status | nul | long (n= bytes)."""
    plan.raw = {
        "garbage": b"\x16\x03\x01 not http at all\r\n\r\n",
        "status": b"HTTP/1.1 abc OK\r\n\r\n",
        "nul": b"HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 0\r\n\r\n",
        "long": b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * n + b"\r\nContent-Length: 0\r\n\r\n",
    }[mode]


def head_lies(plan: Plan, *, n: int = 1000) -> None:
    """HEAD reports a size that is n= too large."""
    if plan.request.method == "HEAD":
        plan.announced = len(plan.body) + n


def no_ranges(plan: Plan) -> None:
    """As a plain server: Accept-Ranges: none, and the whole object."""
    ignore_range(plan)
    plan.headers["Accept-Ranges"] = "none"


def clean(plan: Plan) -> None:
    """Nothing."""


def listing(plan: Plan, *, mode: Literal["loop", "dup", "emptypage"] = "loop") -> None:
    """Pages of a listing: mode=loop (same forever) | dup (name twice) | emptypage (first empty)."""


_PLAIN = (
    *(latency, slowdown, status, expired, reset_pre, close_pre, hang, head_stall, reset_body, close_body),
    *(short_chunked, chunked, no_length, len_more, len_less, ignore_range, wrong_range, multipart, stall, drip, flip),
    *(zeros, html200, replaced, etag, redirect, gzipped, gzbomb, silent_close, close, interim, bad_head, head_lies),
    *(no_ranges, clean, listing),
)
FAULTS: dict[str, Callable[..., None]] = {fault.__name__: fault for fault in _PLAIN} | {
    f"s{code}": _status(code) for code in (400, 401, 403, 404, 405, 408, 416, 429, 500, 502, 504)
}


def _stop(plan: Plan, at: float | None, what: str, seconds: float = 0.0) -> None:
    last = max(0, len(plan.body) - 1)
    at = plan.rng.randint(0, last) if at is None else at
    plan.stops.append((int(at * len(plan.body)) if at < 1 else min(int(at), last), what, seconds))


@lru_cache(maxsize=2)
def _bomb(mb: int) -> bytes:
    return gzip.compress(bytes(mb * 2**20), mtime=0)
