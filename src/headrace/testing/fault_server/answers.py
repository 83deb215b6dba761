"""The correct answer to a request, as a plan that faults may change."""

from __future__ import annotations

import html
import random
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
