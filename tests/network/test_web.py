"""Our own client gives what the server has, or the one right error, and leaves nothing of one answer to the next."""

import asyncio
import resource
import socket
import ssl
import subprocess
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network.bodies import numbered
from network.scripted import LOOPS, Reply, chunked, ok, part, serving

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    LoaderClosedError,
    ObjectChangedError,
    ObjectMissingError,
    OptionError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
    ThrottledError,
)
from headrace.fetch.web.client import Web, proxy_for
from headrace.fetch.web.connection import Body, Connection
from headrace.fetch.web.connections import Connections, is_public
from headrace.fetch.web.http1 import target_of
from headrace.options import Fetch
from headrace.types import Answer

pytestmark = pytest.mark.anyio

BODY = bytes(range(256)) * 4
SIZE = len(BODY)
LONG = bytes(range(251)) * 2000


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@asynccontextmanager
async def client(tls: ssl.SSLContext | None = None, **settings: Any) -> AsyncIterator[Web]:
    connections = Connections(Fetch(connect_timeout_s=0.5), tls, **settings)
    try:
        yield Web(connections)
    finally:
        await connections.aclose()


async def body_of(answer: Answer) -> bytes:
    """The body by `read_into` where its length is known, otherwise in pieces."""
    if answer.stop is None:
        return b"".join([bytes(piece) async for piece in answer.chunks])
    assert isinstance(answer.chunks, Body) or answer.start == answer.stop
    room = bytearray(answer.stop - answer.start + 10)
    if isinstance(answer.chunks, Body):
        assert await answer.chunks.read_into(memoryview(room)) == len(room) - 10
        assert await answer.chunks.read_into(memoryview(room)[-10:]) == 0
    return bytes(room[:-10])


def asked(*answers: Reply | bytes, start: int | None = None, stop: int | None = None, **more: Any) -> Any:
    async def ask() -> Any:
        async with serving(*answers) as script, client() as web:
            answer = await web.get(f"{script.url}/a?signature=secret", start, stop, **more)
            return (answer.start, answer.stop, answer.size), await body_of(answer), script

    return ask()


PART = f"Content-Range: bytes 10-19/{SIZE}\r\n"
GONE = "416 Range Not Satisfiable"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "start", "stop", "expected"),
    [
        ([ok(BODY)], None, None, (0, SIZE, SIZE)),
        ([ok(BODY, f"Padding: {'x' * 40_000}")], None, None, (0, SIZE, SIZE)),
        ([b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n" + ok(BODY)], None, None, (0, SIZE, SIZE)),
        ([ok(BODY, "Content-Encoding: aws-chunked")], None, None, (0, SIZE, SIZE)),
        ([chunked(BODY[:7], BODY[7:])], None, None, (0, None, None)),
        ([part(BODY[10:20], 10, SIZE)], 10, 20, (10, 20, SIZE)),
        ([part(BODY[10:], 10, SIZE)], 10, SIZE + 5, (10, SIZE, SIZE)),
        ([part(BODY[10:], 10, SIZE)], 10, None, (10, SIZE, SIZE)),
        ([part(BODY[:20], 0, SIZE)], None, 20, (0, 20, SIZE)),
        ([part(BODY[10:20], 10, "*")], 10, 20, (10, 20, None)),
        ([chunked(BODY[10:15], BODY[15:20], status="206 Part", fields=PART)], 10, 20, (10, 20, SIZE)),
        ([Reply(f"HTTP/1.1 206 Part\r\n{PART}\r\n".encode() + BODY[10:20], "end")], 10, 20, (10, 20, SIZE)),
        # The range is ignored.
        ([ok(BODY)], 0, 20, (0, 20, SIZE)),
        ([ok(BODY)], 10, 20, (10, 20, SIZE)),
        ([ok(BODY)], 10, None, (10, SIZE, SIZE)),
        ([chunked(BODY[:7], BODY[7:])], 0, 20, (0, None, None)),
        ([chunked(BODY[:7], BODY[7:])], 10, 20, (10, None, None)),
        ([chunked(BODY[:7], BODY[7:])], 10, SIZE + 5, (10, None, None)),
        # The object ends before the start.
        ([ok(b"", f"Content-Range: bytes */{SIZE}", status=GONE)], SIZE + 5, SIZE + 9, (SIZE, SIZE, SIZE)),
        ([ok(b"no", status=GONE), ok(BODY)], SIZE + 5, SIZE + 9, (SIZE, SIZE, SIZE)),
        ([ok(b"", f"Content-Range: bytes */{SIZE}", status=GONE), ok(BODY)], 10, 20, (10, 20, SIZE)),
        # The object is empty.
        ([ok(b"")], None, None, (0, 0, 0)),
        ([ok(b"")], 0, 9, (0, 0, 0)),
        ([chunked()], None, None, (0, None, None)),
        ([ok(b"", "Content-Range: bytes */0", status=GONE)], 0, 9, (0, 0, 0)),
        ([ok(b"no", status=GONE), ok(b"")], 0, 9, (0, 0, 0)),
    ],
)
async def test_answer_is_exact(
    answers: list[Reply | bytes], start: int | None, stop: int | None, expected: tuple[Any, ...]
) -> None:
    got, body, _ = await asked(*answers, start=start, stop=stop)
    is_empty = answers == [chunked()] or expected == (0, 0, 0)
    assert (got, body) == (expected, b"" if is_empty else BODY[start or 0 : stop])


@pytest.mark.parametrize(
    ("answer", "start", "words"),
    [
        (part(BODY[11:21], 11, SIZE), 10, "asked for bytes 10 to 20, it has 11 to 21 of 1024"),
        (part(BODY[10:19], 10, SIZE), 10, "10 to 19"),
        (part(BODY[10:21], 10, SIZE), 10, "10 to 21"),
        (part(BODY[10:19], 10, "*"), 10, "of unknown"),
        (part(BODY[10:20], 10, SIZE), None, "asked for bytes 0 to the end"),
        (ok(BODY[10:20], status="206 Part"), 10, "Content-Range"),
        (ok(BODY[10:20], f"Content-Range: bytes */{SIZE}", status="206 Part"), 10, "no single range"),
        (part(BODY[10:20], 10, SIZE, "Content-Type: multipart/byteranges; boundary=x"), 10, "no single range"),
        (ok(BODY[10:19], PART.strip(), status="206 Part"), 10, "it has 9 bytes"),
        (chunked(BODY[10:21], status="206 Part", fields=PART), 10, "longer than announced"),
        (ok(BODY, "Content-Encoding: gzip"), None, "without this header"),
        (part(BODY[10:20], 10, SIZE, "Content-Encoding: br"), 10, "without this header"),
        (Reply(b"HTTP/1.1 200 OK\r\n\r\n" + BODY, "end"), None, "nothing marks the end of its body"),
        (ok(LONG), 300_000, "ignores byte ranges"),
        (chunked(LONG), 300_000, "ignores byte ranges"),
        (ok(BODY), SIZE, "ignores byte ranges"),  # it may be a login page
        (chunked(BODY), SIZE + 5, "ignores byte ranges"),
        (b"SSH-2.0-OpenSSH\r\n", None, "does not begin as HTTP does"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n123456", None, "two different"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", None, "interim"),
        (b"HTTP/1.1 102 Wait\r\n\r\n" * 20, None, "interim"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n", None, "chunk"),
    ],
)
async def test_answer_to_another_request_is_refused(answer: bytes | Reply, start: int | None, words: str) -> None:
    stop = None if start is None else start + 10
    with pytest.raises(BadResponseError, match=words) as caught:
        await asked(answer, start=start, stop=stop)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "kind", "after"),
    [
        ("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>", ObjectMissingError, None),
        ("410 Gone", b"", ObjectMissingError, None),
        ("401 No", b"", AccessDeniedError, None),
        ("403 No", b"x" * 9000, AccessDeniedError, None),
        ("400 Bad Request", b"<Code>ExpiredToken</Code>", AccessDeniedError, None),
        ("400 Bad Request", b"<Code>Odd</Code>", StorageError, None),
        ("412 No", b"", ObjectChangedError, None),
        ("503 Slow Down", b"<Code>SlowDown</Code>", ThrottledError, "1.5"),
        ("429 Too Many", b"", ThrottledError, "7"),
        ("500 Oh", b"<Code>ServerBusy</Code>", ThrottledError, None),
        ("500 Oh", b"", StorageError, "2"),
        ("204 No Content", b"", StorageError, None),
        ("304 Not Modified", b"", StorageError, None),
    ],
)
async def test_status_is_its_error(status: str, body: bytes, kind: type[StorageError], after: str | None) -> None:
    fields = () if after is None else (f"Retry-After: {after}",)
    with pytest.raises(StorageError) as caught:
        await asked(ok(body, *fields, status=status))
    error = caught.value
    assert type(error) is kind
    assert error.status == int(status[:3])
    assert error.retry_after_s == (None if after is None else float(after))
    assert ("name one mirror" in str(error)) == (kind is ObjectChangedError)
    assert "secret" not in str(error)
    assert f"{status[:3]}{' ' + body.decode().split('Code>')[1][:-2] if b'Code' in body else ''} (" in str(error)


async def test_connection_serves_on_after_a_refusal_and_after_an_answer() -> None:
    answers = (ok(b"no", status="404 No"), ok(BODY), chunked(BODY), ok(b""), part(BODY[:5], 0, SIZE), ok(BODY))
    async with serving(*answers) as script, client() as web:
        with pytest.raises(ObjectMissingError):
            await web.get(script.url)
        for stop in (None, None, None, 5, None):
            await body_of(await web.get(script.url, stop=stop))
        assert (len(script.requests), script.connections) == (6, 1)


async def test_request_says_what_is_wanted_and_the_users_headers() -> None:
    wanted = {"start": 5, "stop": 9, "if_match": '"v"', "headers": {"USER-AGENT": "me", "X": "y"}}
    _, _, script = await asked(part(BODY[5:9], 5, SIZE, 'ETag: "v"'), **wanted)
    host = script.url.removeprefix("http://")
    assert script.requests[0].startswith("GET /a?signature=secret HTTP/1.1\r\n")
    assert script.fields() == {
        "host": host,
        "accept-encoding": "identity",
        "range": "bytes=5-8",
        "if-match": '"v"',
        "user-agent": "me",
        "x": "y",
    }


async def test_weak_version_is_not_sent_but_compared() -> None:
    _, _, script = await asked(ok(BODY, 'ETag: W/"v"'), if_match='W/"v"')
    assert "if-match" not in script.fields()
    with pytest.raises(ObjectChangedError, match='W/"w"'):
        await asked(ok(BODY, 'ETag: W/"w"'), if_match='W/"v"')


@pytest.mark.parametrize(
    ("url", "headers"),
    [("http://host\\x/", {}), ("ftp://host/", {}), ("http://host/a\nb", {}), ("http://host/", {"X": "secret\r\nA: b"})],
)
async def test_what_cannot_be_sent_is_an_option_error(url: str, headers: dict[str, str]) -> None:
    async with client() as web:
        with pytest.raises(OptionError) as caught:
            await web.get(url, headers=headers)
        assert "secret" not in "".join(traceback.format_exception(caught.value)).partition("Traceback")[0]
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "received"),
    [
        (Reply(ok(LONG)[:-1000], "end"), len(LONG) - 1000),
        (Reply(ok(LONG)[: -len(LONG)], "end"), 0),
        (Reply(chunked(LONG)[:-1000], "end"), len(LONG) - 993),
        (Reply(chunked(BODY)[:-2], "end"), SIZE),
        (Reply(chunked(BODY[10:20], status="206 Part", fields=f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n")), 10),
    ],
)
async def test_cut_body_is_an_error_and_what_came_is_in_its_place(answer: Reply, received: int) -> None:
    async with serving(answer) as script, client() as web:
        body = (await web.get(script.url, 0, SIZE) if received == 10 else await web.get(script.url)).chunks
        assert isinstance(body, Body)
        room = bytearray(len(LONG))
        with pytest.raises(ShortReadError, match="within the body"):
            await body.read_into(memoryview(room))
        assert body.received == received
        expected = LONG if received > SIZE else BODY[10:] if received == 10 else BODY
        assert room[:received] == expected[:received]
        with pytest.raises(ShortReadError):
            await body.read_into(memoryview(room))  # an end that is none stays one


@pytest.mark.parametrize("extra", [b"!", b"x" * 20_000, ok(b"forged")])
@pytest.mark.parametrize("stop", [None, 9])
async def test_what_follows_an_answer_never_reaches_the_next(extra: bytes, stop: int | None) -> None:
    async with serving(ok(LONG) + extra, ok(b"second")) as script, client() as web:
        assert await body_of(await web.get(script.url, stop=stop)) == LONG[:stop]
        assert await body_of(await web.get(script.url)) == b"second"
        assert script.connections == 2


async def test_connection_that_ended_while_nobody_used_it_is_replaced_unnoticed() -> None:
    async with serving(ok(BODY), Reply(b"", "end"), ok(BODY), Reply(b"", "reset"), ok(BODY)) as script, client() as web:
        for _ in range(3):
            assert await body_of(await web.get(script.url)) == BODY
        assert (len(script.requests), script.connections) == (5, 3)


@pytest.mark.parametrize(
    ("answers", "requests"),
    [
        ([Reply(b"", "end")], 1),
        ([Reply(b"", "reset")], 1),
        ([Reply(b"HTTP/1.1 200 OK\r\nContent-", "end")], 1),
        ([ok(BODY), Reply(b"", "end"), Reply(b"", "end")], 3),
        ([ok(BODY), Reply(b"HTTP/1.1 2", "end")], 2),
    ],
)
async def test_connection_that_ends_before_the_answer_is_an_error(answers: list[Reply | bytes], requests: int) -> None:
    async with serving(*answers) as script, client() as web:
        if requests > 1:
            await body_of(await web.get(script.url))
        with pytest.raises(StorageError, match="ended before the answer") as caught:
            await web.get(script.url)
        assert type(caught.value) is StorageError
        assert len(script.requests) == requests


async def test_idle_connection_is_closed_when_it_is_old() -> None:
    async with serving(ok(BODY)) as script, client(idle_s=0.01) as web:
        await body_of(await web.get(script.url))
        await script.gone.wait()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", ok(LONG)[:-1000], chunked(LONG)[:-1000]])
async def test_cancelled_read_closes_its_connection_and_no_other(answer: bytes) -> None:
    async with serving(answer, ok(BODY)) as script, client() as web:

        async def read() -> bytes:
            return await body_of(await web.get(script.url))

        task = asyncio.ensure_future(read())
        await script.asked.acquire()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await script.gone.wait()
        assert [await read(), await read()] == [BODY, BODY]
        assert script.connections == 2


async def test_closing_ends_what_is_under_way() -> None:
    async with serving(ok(LONG)[:-1], b"") as script:
        async with client() as web:
            body = (await web.get(script.url)).chunks
            reading = asyncio.ensure_future(web.get(script.url))
            await script.asked.acquire()
            await script.asked.acquire()
        with pytest.raises(StorageError, match="ended"):
            await reading
        with pytest.raises(ShortReadError):
            await body.read_into(memoryview(bytearray(len(LONG))))  # type: ignore[attr-defined]
        with pytest.raises(LoaderClosedError):
            await web.get(script.url)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(lambda _: None), sock=ours)
    try:
        yield connection, theirs
    finally:
        connection.abort()
        await connection.closed
        theirs.close()


@given(
    st.binary(max_size=600),
    st.booleans(),
    st.lists(st.integers(1, 800), max_size=8),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_body_is_the_same_in_any_pieces(data: bytes, is_chunked: bool, boundaries: list[int], reads: list[int]) -> None:
    wire = (
        chunked(*([data[:100], data[100:]] if len(data) > 100 else [data] if data else [])) if is_chunked else ok(data)
    )

    async def ask() -> tuple[bytes, int]:
        async with pair() as (connection, theirs):

            async def send() -> None:
                edges = sorted({0, *(cut for cut in boundaries if cut < len(wire)), len(wire)})
                for begin, end in pairwise(edges):
                    theirs.sendall(wire[begin:end])
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)

            sending = asyncio.ensure_future(send())
            body = Body(connection, await connection.ask(b"GET"), "http://host/")
            got = b""
            for size in reads:
                room = bytearray(size)
                got += room[: await body.read_into(memoryview(room))]
            assert body.received == len(got)
            got += b"".join([bytes(piece) async for piece in body])
            await sending
            return got, body.received

    assert asyncio.run(ask()) == (data, len(data))


async def test_body_that_nobody_reads_fills_no_memory() -> None:
    async with pair() as (connection, theirs):
        theirs.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        body = Body(connection, await connection.ask(b"GET"), "http://host/")
        sent = idle_turns = 0
        while idle_turns < 20:
            try:
                sent += theirs.send(b"x" * 65536)
                idle_turns = 0
            except BlockingIOError:
                idle_turns += 1
            await asyncio.sleep(0)
        assert connection.buffered().nbytes <= 32 * 1024
        assert sent < 5_000_000
        room = bytearray(sent)
        assert await body.read_into(memoryview(room)) == sent
        assert room == b"x" * sent


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b""])
async def test_what_comes_while_nothing_was_asked_closes_the_connection(unasked: bytes) -> None:
    async with pair() as (connection, theirs):
        theirs.send(ok(b""))
        Body(connection, await connection.ask(b"GET"), "http://host/")
        assert connection.is_usable()
        if unasked:
            theirs.send(unasked)
        else:
            theirs.shutdown(socket.SHUT_WR)
        assert not connection.is_usable()
        await connection.closed


def moved(to: str, status: int = 302, body: bytes = b"moved") -> bytes:
    return ok(body, f"Location: {to}", status=f"{status} Moved")


@pytest.mark.parametrize(
    ("status", "location", "path"),
    [
        (301, "/b/c?d=%2F", "/b/c?d=%2F"),
        (302, "other", "/a/other"),
        (303, "../up", "/up"),
        (307, "?q", "/a/x?q"),
        (308, "b c#fragment", "/a/b%20c"),
        (302, "caf\xe9", "/a/caf%E9"),
    ],
)
async def test_redirect_is_followed_to_where_it_points(status: int, location: str, path: str) -> None:
    async with serving(moved(location, status), part(BODY[3:9], 3, SIZE)) as script, client() as web:
        final: list[str] = []
        answer = await web.get(f"{script.url}/a/x", 3, 9, headers={"X-Api-Key": "k"}, redirected=final.append)
        assert await body_of(answer) == BODY[3:9]
        assert script.requests[1].startswith(f"GET {path} HTTP/1.1")
        assert (script.fields()["x-api-key"], script.fields()["range"]) == ("k", "bytes=3-8")
        assert [target_of(url).path for url in final] == [path]
        assert script.connections == 1


async def test_other_origin_gets_no_header_of_the_user_also_on_the_way_back() -> None:
    async with serving(b"") as home, serving(b"") as other, client() as web:
        home.answers = [moved("/again"), moved(f"{other.url}/b"), ok(BODY)]
        other.answers = [moved(f"{home.url}/c")]
        url = home.url.replace("http://", "http://user:word@") + "/a"
        await body_of(await web.get(url, headers={"X-Api-Key": "k", "Cookie": "c", "User-Agent": "me"}))
        assert [(home.fields(n).get("x-api-key"), home.fields(n).get("authorization")) for n in range(3)] == [
            ("k", "Basic dXNlcjp3b3Jk"),
            ("k", "Basic dXNlcjp3b3Jk"),
            (None, None),
        ]
        assert set(other.fields()) == {"host", "accept-encoding", "user-agent"}
        assert (home.fields(0)["user-agent"], other.fields()["user-agent"]) == ("me", "headrace")
        assert home.fields(0)["host"] == home.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("locations", "words"),
    [
        (["/b", "/a"], "round in a circle"),
        (["/1", "/2", "/3", "/4", "/5", "/6"], "more than 5 times"),
        (["file:///etc/passwd"], "no http or https"),
        (["data:text/plain,x"], "no http or https"),
        (["http://host\\@x/"], "no http or https"),
        (["http://127.0.0.1:1/?signature=secret"], "no connection"),
    ],
)
async def test_redirect_that_leads_nowhere_is_an_error_that_names_both_ends(locations: list[str], words: str) -> None:
    async with serving(*map(moved, locations)) as script, client() as web:
        url = script.url.replace("http://", "http://user:secret@") + "/a"
        with pytest.raises(StorageError, match=words) as caught:
            await web.get(url, headers={"X": "secret"})
        assert "secret" not in str(caught.value)
        assert script.url in str(caught.value)
        if words != "no connection":
            assert isinstance(caught.value, BadResponseError)
            assert locations[-1] in str(caught.value) or "\\" in locations[-1]


@pytest.mark.parametrize(
    ("public", "is_allowed"), [(["127.0.0.1"], False), ([], True), (["127.0.0.1", "127.0.0.2"], True)]
)
@pytest.mark.parametrize("is_known", [False, True])
async def test_public_server_leads_to_no_private_one(public: list[str], is_allowed: bool, is_known: bool) -> None:
    async with (
        serving(ok(b"inside"), host="127.0.0.2") as inside,
        serving(moved(f"{inside.url}/x")) as outside,
        client(is_public=public.__contains__) as web,
    ):
        if is_known:  # then a connection to it stands already
            await body_of(await web.get(inside.url))
        if is_allowed:
            assert await body_of(await web.get(outside.url)) == b"inside"
        else:
            with pytest.raises(BadResponseError, match=r"127\.0\.0\.2.* private network"):
                await web.get(outside.url)
        assert len(inside.requests) == is_known + is_allowed


PUBLIC = "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"
PRIVATE = (
    "127.0.0.1 10.1.2.3 169.254.169.254 100.100.100.200 0.0.0.0 168.63.129.16 192.0.0.192 192.88.99.1 224.0.0.1 "
    "::1 :: fe80::1%eth0 fd00:ec2::254 ff02::1 2002:7f00:1::1 fec0::1 ::127.0.0.1 ::8.8.8.8 5f00::1 3fff::1 "
    "::ffff:127.0.0.1 ::ffff:168.63.129.16 ::ffff:0:169.254.169.254 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe "
    "64:ff9b:1::808:808"
)


@pytest.mark.parametrize(("addresses", "expected"), [(PUBLIC, True), (PRIVATE, False)])
def test_public_addresses_are_those_of_the_public_network(addresses: str, expected: bool) -> None:
    assert {address: is_public(address) for address in addresses.split()} == dict.fromkeys(addresses.split(), expected)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's side and ours of a certificate for 127.0.0.1 that nobody has signed."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *names)
    subprocess.run([*command, "-days", "2", "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(cert, key)
    return theirs, ssl.create_default_context(cafile=str(cert))


async def test_encrypted_answers_are_read_where_the_certificate_is_trusted(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    theirs, ours = contexts
    answers = (ok(LONG), chunked(LONG), ok(LONG)[:-7], moved("http://127.0.0.1:1/"))
    async with serving(*answers, tls=theirs) as script, client(ours) as web, client() as stranger:
        assert await body_of(await web.get(script.url)) == LONG
        assert await body_of(await web.get(script.url)) == LONG
        assert script.connections == 1
        await web.get(script.url)  # and nobody reads it
        with pytest.raises(BadResponseError, match="without encryption"):
            await web.get(script.url)
        with pytest.raises(BadResponseError, match=r"certificate of 127\.0\.0\.1 was refused"):
            await stranger.get(script.url)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [0, 300])
@pytest.mark.parametrize("answer", [ok, chunked])
@pytest.mark.parametrize("size", [20_000, 60_000, 200_000])
async def test_encrypted_answers_are_whole_though_the_server_closes_after_them(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], size: int, answer: Callable[[bytes], bytes], turns: int
) -> None:
    theirs, ours = contexts
    body = numbered(size)
    async with serving(Reply(answer(body), "end"), tls=theirs) as script, client(ours) as web:
        got = await web.get(script.url)
        for _ in range(turns):  # in which all of it comes, and the end
            await asyncio.sleep(0)
        assert await body_of(got) == body


async def test_connection_that_does_not_come_about_in_time_is_an_error() -> None:
    async with client() as web:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # it never answers the handshake
            with pytest.raises(ReadTimeoutError, match=r"no connection within 0\.5 seconds"):
                await web.get(f"https://127.0.0.1:{silent.getsockname()[1]}/")
        with pytest.raises(StorageError, match=r"no connection: .*refused"):
            await web.get("http://127.0.0.1:1/")


async def test_idle_connections_make_room_where_descriptors_are_short() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server cannot accept all of them
    async with serving(ok(BODY)) as crowded, serving(ok(b"other")) as other, client() as web:
        answers = await asyncio.gather(*(web.get(crowded.url) for _ in range(4)))
        for answer in answers:
            await body_of(answer)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as highest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), hard))
            try:
                assert await body_of(await web.get(other.url)) == b"other"
                held = []
                with pytest.raises(StorageError, match="ulimit -n"):
                    while True:
                        held.append(await web.get(other.url))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_proxy_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for("https://host/a") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inner.example")
    assert proxy_for("https://host/a") == "http://proxy:3128"
    assert proxy_for("https://x.inner.example/a") is None
    assert proxy_for("http://host/a") is None
