"""The fault server produces each fault of its table, for the chosen requests."""

import gzip
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.errors import OptionError
from headrace.testing import FaultServer
from headrace.testing.fault_server.faults import FAULTS

BODY = random.Random(1).randbytes(3000)
PART = BODY[1000:2000]


class Seen(NamedTuple):
    raw: bytes
    is_reset: bool

    @property
    def head(self) -> str:
        return self.raw.partition(b"\r\n\r\n")[0].decode()

    @property
    def body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ")[1])

    @property
    def length(self) -> int:
        return int(self.header("Content-Length"))

    def header(self, name: str) -> str:
        found = re.search(rf"^{name}: (.*?)\r?$", self.head, re.MULTILINE)
        return found[1] if found else ""


def ask(url: str, *headers: str, method: str = "GET") -> Seen:
    place, _, target = url.removeprefix("http://").partition("/")
    host, _, port = place.partition(":")
    lines = [f"{method} /{target} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    raw = b""
    try:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall("\r\n".join(lines).encode())
            while data := connection.recv(65536):
                raw += data
    except ConnectionError:
        return Seen(raw, True)
    return Seen(raw, False)


def ask_part(url: str) -> Seen:
    return ask(url, "Range: bytes=1000-1999")


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(seed=3) as running:
        yield running


def is_good(seen: Seen) -> bool:
    return (seen.status, seen.body, seen.header("Content-Range")) == (206, PART, "bytes 1000-1999/3000")


def bits_that_differ(seen: Seen) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(seen.body, PART, strict=True))


SHOWN: dict[str, Callable[[Seen], bool]] = {
    **dict.fromkeys(
        (
            *("clean", "listing", "head_lies", "silent_close", "head_stall:s=0.01", "stall:s=0.01", "drip:bps=100000"),
            *("latency:ms=1", "latency:dist=pareto,ms=1,max=2", "latency:dist=lognormal,ms=1,max=2"),
            *("latency:dist=uniform,ms=1", "latency:dist=exp,ms=1,max=2"),
        ),
        is_good,
    ),
    "interim": lambda seen: is_good(Seen(seen.raw.partition(b"\r\n\r\n")[2], False)) and seen.status == 103,
    "close": lambda seen: is_good(seen) and seen.header("Connection") == "close",
    "status:code=418,s3=Teapot,retry_after=7": lambda seen: (
        (seen.status, seen.header("Retry-After")) == (418, "7") and b"<Code>Teapot</Code>" in seen.body
    ),
    "slowdown": lambda seen: seen.status == 503 and b"SlowDown" in seen.body and not seen.header("Retry-After"),
    "slowdown:retry_after=0.5": lambda seen: seen.header("Retry-After") == "0.5",
    "slowdown:retry_after=3,date=1": lambda seen: (
        parsedate_to_datetime(seen.header("Retry-After")).timestamp() > time.time()
    ),
    **{
        f"s{code}": lambda seen, code=code: seen.status == code and b"<Error>" in seen.body
        for code in (400, 401, 403, 404, 405, 408, 416, 429, 500, 502, 504)
    },
    "expired": lambda seen: seen.status == 400 and b"ExpiredToken" in seen.body,
    "expired:skew=1": lambda seen: seen.status == 403 and b"RequestTimeTooSkewed" in seen.body,
    "reset_pre": lambda seen: seen == (b"", True),
    "close_pre": lambda seen: seen == (b"", False),
    "hang:s=0.01": lambda seen: seen == (b"", False),
    "reset_body:at=100": lambda seen: (seen.body, seen.length, seen.is_reset) == (PART[:100], 1000, True),
    "close_body:at=0.5": lambda seen: (seen.body, seen.length, seen.is_reset) == (PART[:500], 1000, False),
    "close_body": lambda seen: seen.length == 1000 and len(seen.body) < 1000 and PART.startswith(seen.body),
    "chunked": lambda seen: seen.body == b"3e8\r\n%b\r\n0\r\n\r\n" % PART and not seen.header("Content-Length"),
    "short_chunked:at=16": lambda seen: seen.body == b"10\r\n%b\r\n" % PART[:16],
    "no_length": lambda seen: seen.body == PART and not seen.header("Content-Length"),
    "no_length:at=10": lambda seen: seen.body == PART[:10] and not seen.header("Content-Length"),
    "len_more": lambda seen: (seen.length, seen.body) == (1010, PART),
    "len_less": lambda seen: (seen.length, seen.body) == (990, PART),
    "ignore_range": lambda seen: (seen.status, seen.body, seen.header("Content-Range")) == (200, BODY, ""),
    "no_ranges": lambda seen: (seen.status, seen.body, seen.header("Accept-Ranges")) == (200, BODY, "none"),
    "wrong_range": lambda seen: (seen.body, seen.header("Content-Range")) == (PART, "bytes 1007-2006/3000"),
    "wrong_range:mode=data": lambda seen: is_good(seen._replace(raw=seen.raw.replace(BODY[1007:2007], PART))),
    "wrong_range:mode=total": lambda seen: (seen.body, seen.header("Content-Range")) == (PART, "bytes 1000-1999/3007"),
    "wrong_range:mode=short": lambda seen: (
        (seen.body, seen.header("Content-Range")) == (PART[:-7], "bytes 1000-1992/3000")
    ),
    "wrong_range:mode=none": lambda seen: (seen.body, seen.header("Content-Range")) == (PART, ""),
    "multipart": lambda seen: seen.body.startswith(b"--XX") and PART in seen.body and not seen.header("Content-Range"),
    "flip": lambda seen: bits_that_differ(seen) == 1,
    "zeros:n=64": lambda seen: bits_that_differ(seen) > 0 and bytes(64) in seen.body,
    "html200": lambda seen: seen.status == 200 and b"log in" in seen.body,
    "replaced": lambda seen: seen.status == 206 and bits_that_differ(seen) == 8000,
    "etag": lambda seen: is_good(seen) and re.fullmatch(r'"[0-9a-f]+"', seen.header("ETag")) is not None,
    "etag:weak=1": lambda seen: is_good(seen) and seen.header("ETag").startswith('W/"'),
    "etag:none=1": lambda seen: is_good(seen) and not seen.header("ETag"),
    "redirect:n=3": lambda seen: seen.status == 302 and seen.header("Location").endswith("?hops=2"),
    "redirect:mode=loop,code=307": lambda seen: seen.status == 307 and seen.header("Location").endswith("?hops=loop"),
    "redirect:mode=other": lambda seen: seen.header("Location").startswith("http://127.0.0.1:"),
    "redirect:mode=file": lambda seen: seen.header("Location").startswith("file:"),
    "redirect:mode=meta": lambda seen: "169.254.169.254" in seen.header("Location"),
    "gzipped": lambda seen: gzip.decompress(seen.body) == PART and seen.header("Content-Encoding") == "gzip",
    "gzipped:hide=1": lambda seen: gzip.decompress(seen.body) == PART and not seen.header("Content-Encoding"),
    "gzbomb:mb=2": lambda seen: gzip.decompress(seen.body) == bytes(2**21) and len(seen.body) < 4096,
    "bad_head": lambda seen: not seen.raw.startswith(b"HTTP"),
    "bad_head:mode=status": lambda seen: seen.raw.startswith(b"HTTP/1.1 abc"),
    "bad_head:mode=nul": lambda seen: b"\0" in seen.raw,
    "bad_head:mode=long,n=200000": lambda seen: len(seen.raw) > 200_000,
}


@pytest.mark.parametrize("fault", SHOWN)
def test_fault_is_on_the_wire(server: FaultServer, fault: str) -> None:
    url = server.add(fault, BODY, fault)
    assert SHOWN[fault](ask_part(url)), fault
    assert [request.faults for request in server.requests_for(fault)] == [(fault.partition(":")[0],)]


def test_every_fault_is_shown_and_said_in_one_line() -> None:
    assert {fault.partition(":")[0] for fault in SHOWN} == FAULTS.keys()
    assert len(FAULTS.keys() - {"listing"}) == 46
    for name, fault in FAULTS.items():
        assert fault.__doc__, name
        assert "\n" not in fault.__doc__, name


def test_objects_are_served_as_the_standard_says(server: FaultServer) -> None:
    url = server.add("a b.bin", BODY).replace(" ", "%20")
    whole = ask(url)
    etag = whole.header("ETag")
    assert (whole.status, whole.body, whole.length) == (200, BODY, len(BODY))
    assert is_good(ask_part(url))
    assert ask(url, "Range: bytes=2990-9999").body == BODY[2990:]
    assert ask(url, "Range: bytes=2990-").body == ask(url, "Range: bytes=-10").body == BODY[2990:]
    beyond = ask(url, "Range: bytes=3000-3010")
    assert (beyond.status, beyond.header("Content-Range")) == (416, "bytes */3000")
    assert ask(url, f"If-Match: {etag}").status == ask(url, "If-Match: *").status == 200
    assert ask(url, 'If-Match: "other"').status == 412
    assert ask(url, "Range: bytes=1-2", 'If-Range: "other"').status == 200
    head = ask(url, method="HEAD")
    assert (head.status, head.length, head.body) == (200, len(BODY), b"")
    assert ask(url, method="PUT").status == 405
    assert ask(f"{server.url}/none").status == 404
    assert ask(url, "X: " + "y" * 100_000).status == 400
    assert ask(server.add("lies", BODY, "head_lies:n=5"), method="HEAD").length == len(BODY) + 5


def test_replaced_object_is_another_version(server: FaultServer) -> None:
    url = server.add("replaced", BODY, "clean:times=1", "replaced:times=9")
    old, new = ask(url).header("ETag"), ask(url).header("ETag")
    assert old != new
    assert ask(url, f"If-Match: {old}").status == 412
    assert ask(url, f"If-Match: {new}").status == 200


def test_connection_ends_as_it_was_said(server: FaultServer) -> None:
    for fault in ("clean", "silent_close", "close"):
        server.add("goes-on", BODY, fault)
        client = HTTPConnection(server.url.removeprefix("http://"), timeout=10)
        client.request("GET", "/goes-on")
        answer = client.getresponse()
        assert answer.read() == BODY
        if fault == "clean":
            client.request("GET", "/goes-on")
            assert client.getresponse().read() == BODY
        else:
            assert answer.will_close == (fault == "close")
            assert fault == "close" or client.sock.recv(1) == b""
        client.close()


HITS = {
    "p=0": "......",
    "first=2": "xx....",
    "after=4": "....xx",
    "only=3": "..x...",
    "every=2": ".x.x.x",
    "times=3": "xxx...",
    "burst=2,gap=1": "xx.xx.",
    "method=HEAD": "......",
    "range=bytes": "......",
    "match=t*": "......",
    "match=h*,method=GET": "xxxxxx",
    "t0=3600": "......",
    "t1=3600": "xxxxxx",
}


@pytest.mark.parametrize("selector", HITS)
def test_fault_hits_the_requests_that_were_chosen(selector: str) -> None:
    with FaultServer({"hit": BODY}, faults=[f"s500:{selector}"]) as server:
        assert "".join("x" if ask(f"{server.url}/hit").status == 500 else "." for _ in range(6)) == HITS[selector]
        assert server.hits == ({"s500": HITS[selector].count("x")} if "x" in HITS[selector] else {})


def test_faults_with_times_take_turns_beside_the_others() -> None:
    with FaultServer(faults=["close"]) as server:
        url = server.add("turns", BODY, "s500:times=2", "s404:times=1")
        seen = [ask(url) for _ in range(4)]
    assert [one.status for one in seen] == [500, 500, 404, 200]
    assert {one.header("Connection") for one in seen} == {"close"}


def outcomes(seed: int, order: list[int]) -> dict[str, list[bytes]]:
    names = [f"{n}" for n in range(6)]
    with FaultServer(dict.fromkeys(names, BODY), faults=["reset_body:p=0.5", "flip:p=0.5"], seed=seed) as server:
        got: dict[str, list[bytes]] = {name: [] for name in names}
        for n in order:
            got[f"{n}"].append(ask(f"{server.url}/{n}").body)
        return got


def test_hits_are_a_function_of_seed_object_and_attempt() -> None:
    order = [n for n in range(6) for _ in range(3)]
    shuffled = random.Random(0).sample(order, len(order))
    assert outcomes(1, order) == outcomes(1, shuffled) != outcomes(2, order)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rest_body", "'rest_body'.*one of.*reset_body"),
        ("reset_body:where=3", "'where'.*one of 'at', 'p',"),
        ("reset_body:at=middle", "at=middle.*a number"),
        ("flip:n=0.5", "n=0.5.*a whole number"),
        ("wrong_range:mode=odd", "mode=odd.*label or data or"),
        ("clean:p=often", "p=often.*a number"),
    ],
)
def test_fault_that_does_not_exist_is_refused(fault: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        FaultServer(faults=[fault])


def test_request_before_its_time_is_counted() -> None:
    with FaultServer() as server:
        url = server.add("hold", BODY, "slowdown:times=1,retry_after=3600")
        ask_part(url)
        assert server.retry_after_violations == 0
        ask(url)  # another range
        assert server.retry_after_violations == 0
        ask_part(url)
        assert server.retry_after_violations == 1


def test_secret_at_the_second_listener_is_counted() -> None:
    with FaultServer({"x": BODY}) as server:
        ask(f"{server.url}/%78?y=1", "Authorization: secret")
        assert not server.credential_leaks
        (request,) = server.log
        assert (request.name, request.target, request.query) == ("x", "/%78?y=1", {"y": "1"})
        assert (request.headers["authorization"], request.attempt, request.range) == ("secret", 1, None)
        assert ask(f"{server.elsewhere_url}/x", "Authorization: secret", "X-Api-Key: secret").body == BODY
        assert server.credential_leaks == {"authorization": 1, "x-api-key": 1}


def test_redirects_lead_to_the_object_or_nowhere(server: FaultServer) -> None:
    def follow(url: str) -> list[int]:
        statuses = []
        while len(statuses) < 9:
            seen = ask(url)
            statuses.append(seen.status)
            if seen.status != 302:
                break
            url = seen.header("Location")
            url = url if url.startswith("http") else server.url + url
        return statuses

    assert follow(server.add("far", BODY, "redirect:n=3")) == [302, 302, 302, 200]
    assert follow(server.add("round", BODY, "redirect:mode=loop")) == [302] * 9
    assert follow(server.add("away", BODY, "redirect:mode=other")) == [302, 200]
    assert [request.elsewhere for request in server.requests_for("away")] == [False, True]


def test_connections_are_bounded_and_idle_ones_closed() -> None:
    with FaultServer({"x": BODY}, idle_close_s=0.01, max_connections=1) as server:
        place = server.url.removeprefix("http://").split(":")
        with socket.create_connection((place[0], int(place[1])), timeout=10) as idle:
            assert idle.recv(1) == b""
        assert server.wait_until_no_connection()
        server.add("hangs", BODY, "hang")
        client = HTTPConnection(server.url.removeprefix("http://"), timeout=10)
        client.request("GET", "/hangs")
        assert server.wait_until_stalled()
        assert (server.connections, server.peak_connections) == (1, 1)
        assert ask(f"{server.url}/x") == (b"", True)
        client.close()
        assert server.wait_until_no_connection()


@pytest.mark.parametrize("fault", ["hang", "stall:s=3600", "head_stall:s=3600", "latency:ms=50000"])
def test_server_ends_at_once_whatever_it_waits_for(fault: str) -> None:
    with FaultServer() as server:
        server.add("waits", BODY, fault)
        client = HTTPConnection(server.url.removeprefix("http://"), timeout=10)
        client.request("GET", "/waits")
        assert fault.startswith("latency") or server.wait_until_stalled()
    client.close()


def pages(server: FaultServer, query: str) -> list[list[str]]:
    """The names on each page of a listing, at most five pages."""
    token, found = "", []
    while len(found) < 5:
        text = ask(f"{server.url}/shelf?list-type=2&max-keys=2{query}{token}").body.decode()
        found.append(re.findall(r"<(?:Key|Contents><Key|CommonPrefixes><Prefix)>(.*?)</", text))
        following = re.search("<NextContinuationToken>(.*?)</", text)
        if following is None:
            break
        token = f"&continuation-token={following[1]}"
    return found


@pytest.mark.parametrize(
    ("fault", "query", "expected"),
    [
        ("clean", "", [["a b", "c/d"], ["c/e"]]),
        ("clean", "&encoding-type=url", [["a%20b", "c/d"], ["c/e"]]),
        ("clean", "&delimiter=/", [["a b", "c/"]]),
        ("clean", "&prefix=c/", [["c/d", "c/e"]]),
        ("clean", "&prefix=c/&delimiter=/", [["c/d", "c/e"]]),
        ("clean", "&start-after=c/d", [["c/e"]]),
        ("listing:mode=loop", "", [["a b", "c/d"]] * 5),
        ("listing:mode=dup", "", [["a b", "c/d"], ["c/d", "c/e"]]),
        ("listing:mode=emptypage", "", [[], ["a b", "c/d"], ["c/e"]]),
    ],
)
def test_bucket_is_listed_in_pages(fault: str, query: str, expected: list[list[str]]) -> None:
    objects = {"shelf/a b": BODY, "shelf/c/d": BODY, "shelf/c/e": BODY, "other/f": BODY}
    with FaultServer(objects, faults=[fault]) as server:
        assert pages(server, query) == expected
        assert ask(f"{server.url}/no-shelf?list-type=2").status == 404


@pytest.mark.slow
def test_folder_is_served_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "shelf" / "deep").mkdir(parents=True)
    (tmp_path / "shelf" / "deep" / "a.bin").write_bytes(BODY)
    (tmp_path / "secret").write_bytes(b"secret")
    command = [sys.executable, "-m", "headrace.testing.fault_server", str(tmp_path / "shelf"), "--fault"]
    refused = subprocess.run([*command, "nonsense"], capture_output=True, text=True, timeout=50)
    assert (refused.returncode, "'nonsense'" in refused.stderr) == (2, True)
    command += ["s500:first=1,match=*.bin"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert [ask(f"{url}/deep/a.bin").status for _ in range(2)] == [500, 200]
            assert ask(f"{url}/deep/a.bin").body == BODY
            (tmp_path / "shelf" / "deep" / "a.bin").write_bytes(PART)
            assert ask(f"{url}/deep/a.bin").body == PART
            assert ask(f"{url}/deep?list-type=2").body.count(b"<Key>a.bin</Key>") == 1
            assert ask(f"{url}/../secret").status == 404
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
