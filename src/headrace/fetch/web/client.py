"""The HTTP(S) client: from an address and a range to a checked answer."""

from __future__ import annotations

import re
import string
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from headrace._util.reads import ReportedVersion
from headrace.errors import BadResponseError, ObjectChangedError, OptionError, StorageError, masked
from headrace.fetch.web.connection import Body, Connection, Rest
from headrace.fetch.web.connections import Connections
from headrace.fetch.web.http1 import (
    Head,
    Target,
    code_in,
    content_range,
    encoded,
    is_plain,
    refusal,
    request,
    retry_after_s,
    target_of,
)
from headrace.fetch.web.index_pages import list_pages
from headrace.types import Answer, Buffer, Listed

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HOPS = 5
_REFUSAL_BYTES = 8 * 1024
_SKIPPED_BYTES = 256 * 1024
_PAGE_BYTES = 64 * 2**20
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_REGION = re.compile(r"[a-z0-9-]{1,32}")


class _WantedAnswer:
    __slots__ = ("fields", "if_match", "name", "start", "stop")

    def __init__(self, name: str, start: int | None, stop: int | None, if_match: str | None) -> None:
        self.name, self.start, self.stop, self.if_match = name, start, stop, if_match
        self.fields: dict[str, str] = {}
        if start is not None or stop is not None:
            begin, end = start or 0, "" if stop is None else stop - 1
            self.fields["Range"] = f"bytes={begin}" if begin < 0 else f"bytes={begin}-{end}"
        # RFC 9110 §13.1.1: a weak validator never matches; the answer's ETag is compared all the same.
        if if_match is not None and not if_match.startswith("W/"):
            self.fields["If-Match"] = if_match

    def begin(self, size: int | None) -> int:
        """First byte of the range in an object of `size` bytes. Raises ValueError if `size` is needed and not known."""
        start = self.start or 0
        if start < 0 and size is None:
            raise ValueError("it does not report the size of the object")
        return start if start >= 0 else max(0, start + (size or 0))

    def end(self, size: int) -> int:
        return size if self.stop is None else min(self.stop, size)


class Web:
    """GETs over one reader's connections."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def get(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
        name: str | None = None,
        redirected: Callable[[str], None] | None = None,
        rest: Rest | None = None,
    ) -> Answer:
        """Request bytes [start, stop) of the object at `url`, sent unchanged. See `Store.get`.

        Args:
            headers: Sent with the request and replacing default fields, but never to another origin.
            name: Address shown in errors, if not `url`.
            redirected: Called with the final address after redirects.
            rest: Holds the open answer of a server without ranges, for the next range.

        Raises:
            OptionError: the address or a header cannot be sent.
        """
        wanted = _WantedAnswer(name or url, start, stop, if_match)
        if rest is not None and stop is not None and (answer := rest.go_on(start or 0, stop, wanted.name)) is not None:
            return answer
        final, connection, head = await self._follow(url, wanted, wanted.fields, headers or {})
        is_beyond = head.status == 416 and bool(wanted.fields)
        if is_beyond:
            answer = await _beyond(connection, head, wanted)
            if answer is not None:
                return answer
            # A GET without a range reports the size. Its body need not be read beyond the requested bytes.
            final, connection, head = await self._follow(url, wanted, {}, headers or {})
        if head.status not in (200, 206):
            raise await self._refusal(connection, head, wanted)
        try:
            if head.status == 206:
                answer = _part(connection, head, wanted)
            else:
                answer = await _whole(connection, head, wanted, None if is_beyond else rest, is_beyond=is_beyond)
        except ValueError as error:
            connection.abort()
            raise BadResponseError(f"the answer cannot be used: {error}", url=wanted.name) from error
        except BaseException:
            connection.abort()
            raise
        if redirected is not None and final != url:
            redirected(final)
        return answer

    async def page(self, url: str, headers: Mapping[str, str], *, name: str) -> tuple[bytes, str]:
        """Return a whole document and its `Link` header, which may have the next page's address.

        Raises:
            StorageError: the request failed.
        """
        wanted = _WantedAnswer(name, None, None, None)
        _, connection, head = await self._follow(url, wanted, {}, headers)
        if head.status != 200:
            raise await self._refusal(connection, head, wanted)
        body, pieces = Body(connection, head, name), list[Buffer]()
        try:
            nbytes = 0
            async for piece in body:
                nbytes += len(piece)
                if nbytes > _PAGE_BYTES:
                    raise BadResponseError(f"a list of more than {_PAGE_BYTES} bytes came", url=name)
                pieces.append(piece)
        finally:
            await body.aclose()
        return b"".join(pieces), head.headers.get("link", "")

    async def _follow(
        self, url: str, wanted: _WantedAnswer, fields: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[str, Connection, Head]:
        public_only, passed = False, [url]
        target = _target(url)
        if target.authorization is not None:
            headers = {"Authorization": target.authorization, **headers}
        while True:
            origin = target.origin
            ours = {"Host": origin.authority, "Accept-Encoding": "identity", "User-Agent": "headrace", **fields}
            try:
                data = request(target.path, ours, headers)
            except ValueError as error:
                raise OptionError.at(wanted.name, f"cannot be asked for: {error}") from error
            connection, head = await self._connections.ask(origin, data, name=wanted.name, public_only=public_only)
            location = head.headers.get("location")
            if head.status not in _REDIRECTS or location is None:
                return url, connection, head
            public_only = public_only or self._connections.is_public(connection.address)
            await _text(connection, head, wanted.name)
            url, target = _next(url, location, passed, wanted.name)
            if target.origin != origin:
                headers = {} if target.authorization is None else {"Authorization": target.authorization}

    async def _refusal(self, connection: Connection, head: Head, wanted: _WantedAnswer) -> StorageError:
        text = await _text(connection, head, wanted.name)
        region = head.headers.get("x-amz-bucket-region", "")
        elsewhere = head.status in (301, 307, 400) and _REGION.fullmatch(region)
        return refusal(
            head.status,
            code_in(text),
            url=wanted.name,
            retry_after_s=retry_after_s(head.headers.get("retry-after", ""), time.time()),
            hint=f"; the bucket is in the region {region}" if elsewhere else "",
        )


class WebStore:
    """Objects under the address `base`. `headers` are never sent to another origin."""

    gives_ends = True

    def __init__(self, base: str, connections: Connections, headers: Mapping[str, str] | None = None) -> None:
        self._base, self._headers = base, headers
        self._web = Web(connections)

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`. A path is sent unchanged, with its query."""
        return await self._web.get(f"{self._base}/{path}", start, stop, if_match=if_match, headers=self._headers)

    async def go_on(
        self, path: str, start: int | None, stop: int | None, *, if_match: str | None, rest: Rest | None
    ) -> Answer:
        """As `Store.get`, for sequential reads: a server without ranges sends the object once."""
        url = f"{self._base}/{path}"
        return await self._web.get(url, start, stop, if_match=if_match, headers=self._headers, rest=rest)

    def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        async def ask(url: str) -> bytes:
            return (await self._web.page(url, self._headers or {}, name=url))[0]

        return list_pages(ask, self._base, prefix, levels)

    async def aclose(self) -> None:
        """Do nothing: the reader closes the connections."""


def proxy_for(url: str) -> str | None:
    """Return the environment's proxy for `url`, or None. This client does not support proxies."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy if proxy and not proxy_bypass(parts.hostname or "") else None


def _target(url: str) -> Target:
    try:
        return target_of(url)
    except ValueError as error:
        raise OptionError.at(url, f"cannot be asked for: {error}") from error


def _next(url: str, location: str, passed: list[str], name: str) -> tuple[str, Target]:
    # Some servers send non-ASCII bytes unescaped.
    location = quote(location.encode("latin-1"), safe=string.punctuation)
    there = location
    try:
        there = location if _ABSOLUTE.match(location) else urljoin(url, location)
        target = target_of(there)
        if there in passed:
            raise ValueError("it goes round in a circle")
        if len(passed) > _HOPS:
            raise ValueError(f"it is redirected more than {_HOPS} times")
        if target.origin.scheme == "http" and url.lower().startswith("https:"):
            raise ValueError("it would continue without encryption")
    except ValueError as error:
        raise BadResponseError(f"redirected to {masked(there)}, which is refused: {error}", url=name) from error
    passed.append(there)
    return there, target


def _part(connection: Connection, head: Head, wanted: _WantedAnswer) -> Answer:
    etag = _checked(head, wanted)
    start, stop, size = content_range(head.headers.get("content-range", "(none)"))
    if start is None or stop is None or head.headers.get("content-type", "").lower().startswith("multipart/"):
        raise ValueError("it is no single range")
    asked_stop = wanted.stop if size is None else wanted.end(size)
    begin = wanted.begin(size)
    if not wanted.fields or (start, stop) != (begin, asked_stop):
        raise ValueError(
            f"asked for bytes {begin} to {'the end' if wanted.stop is None else wanted.stop}, "
            f"it has {start} to {stop} of {'unknown' if size is None else size}"
        )
    if head.length not in (None, stop - start):
        raise ValueError(f"it has {head.length} bytes, and calls them {start} to {stop}")
    body = Body(connection, head, wanted.name, stop - start)
    return Answer(start, stop, size, etag, body, modified=_modified(head))


async def _whole(
    connection: Connection, head: Head, wanted: _WantedAnswer, rest: Rest | None, *, is_beyond: bool
) -> Answer:
    """Return the requested part of a whole object. `is_beyond`: after a 416 for the range."""
    etag = _checked(head, wanted)
    size = head.length
    start = wanted.begin(size)
    if size is None and not head.is_chunked:
        raise ValueError("nothing marks the end of its body: a cut would not be noticed")
    body = Body(connection, head, wanted.name)
    if rest is not None and wanted.stop is not None and (size is None or start < size):
        return rest.begin(
            body, start, wanted.stop, wanted.name, size=size, reported=ReportedVersion(etag, _modified(head))
        )
    if start:
        if is_beyond and size is not None and size <= start:
            body.cut(0)
            return Answer(size, size, size, etag, body, modified=_modified(head))
        # Without that report, a short body may be something else, such as a proxy's page.
        if wanted.start is not None and wanted.start < 0 and start > _SKIPPED_BYTES:
            body.cut(0)
            return Answer(
                size or 0, size, size, etag, body, modified=_modified(head)
            )  # the server may still support a range with a start
        if start > _SKIPPED_BYTES or await body.skip(start) < start or size == start:
            raise ValueError(
                "the server ignores byte ranges, and gave the whole of something; from such a server, Python's "
                "http.server among them, objects are read as a whole or from begin to end, not by an index"
            )
    if wanted.stop is not None:
        body.cut(wanted.stop - start)
    gives_ranges = head.headers.get("accept-ranges", "").lower() == "bytes"
    stop = None if size is None else wanted.end(size)
    return Answer(start, stop, size, etag, body, gives_ranges, modified=_modified(head))


async def _beyond(connection: Connection, head: Head, wanted: _WantedAnswer) -> Answer | None:
    """Return the empty answer to a range beyond the object's end; None if the size is unknown."""
    size = None
    with suppress(ValueError):
        size = content_range(head.headers.get("content-range", "")).size
    await _text(connection, head, wanted.name)
    if size is None or size > wanted.begin(size):
        return None
    return Answer(size, size, size, head.headers.get("etag"), _nothing(), modified=_modified(head))


def _modified(head: Head) -> str | None:
    return head.headers.get("last-modified")


def _checked(head: Head, wanted: _WantedAnswer) -> str | None:
    encoding = head.headers.get("content-encoding")
    if encoding is not None and not is_plain(encoding):
        raise ValueError(encoded(encoding))
    etag = head.headers.get("etag")
    if wanted.if_match is not None and etag is not None and etag != wanted.if_match:
        reason = f"the object changed: its ETag was {wanted.if_match}, now {etag}"
        raise ObjectChangedError(reason, url=wanted.name)
    return etag


async def _text(connection: Connection, head: Head, name: str) -> str:
    """Return the beginning of an error's body. If that is all, the connection is reused."""
    room = bytearray(_REFUSAL_BYTES)
    body = Body(connection, head, name)
    with suppress(StorageError):
        await body.read_into(memoryview(room))
    await body.aclose()
    return room[: body.received].decode("latin-1")


async def _nothing() -> AsyncIterator[Buffer]:
    return
    yield
