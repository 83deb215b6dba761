"""A host is looked up once for all who ask, and its addresses share the load and stand in for one another."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from typing import Any

import pytest
from network.scripted import LOOPS, Script, ok, serving

from headrace.errors import BadResponseError, LoaderClosedError, ReadTimeoutError, StorageError
from headrace.fetch.web.client import Web
from headrace.fetch.web.connections import Address, Connections, Lookups, dial
from headrace.options import Fetch

pytestmark = pytest.mark.anyio

UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
REFUSES = Address(socket.AF_INET, ("127.0.0.1", 1))


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def v4(last: int) -> Address:
    return Address(socket.AF_INET, (f"192.0.2.{last}", 443))


def v6(last: int) -> Address:
    return Address(socket.AF_INET6, (f"2001:db8::{last}", 443, 0, 0))


class Names:
    """A resolver with the answers of a test; it waits for `may_answer`."""

    def __init__(self, *answers: list[Address] | OSError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []
        self.answered: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, host: str, port: int) -> list[Address]:
        self.asked.append((host, port))
        self.may_answer.wait(10)
        self.answered.append(host)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


@asynccontextmanager
async def client(names: Names, **settings: Any) -> AsyncIterator[Web]:
    connections = Connections(Fetch(connect_timeout_s=1.0), resolve=names, **settings)
    try:
        yield Web(connections)
    finally:
        await connections.aclose()


def address_of(script: Script) -> Address:
    host, port = script.url.removeprefix("http://").split(":")
    return Address(socket.AF_INET, (host, int(port)))


@contextmanager
def black_hole() -> Iterator[Address]:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield Address(socket.AF_INET, server.getsockname())


async def test_all_who_ask_share_one_lookup_and_begin_with_different_addresses() -> None:
    names = Names([v6(1), v6(2), v6(3), v4(1), v4(1)])
    names.may_answer.clear()
    with closing(Lookups(names)) as lookups:
        asking = [asyncio.ensure_future(lookups.addresses("host", 443)) for _ in range(6)]
        await asyncio.sleep(0)
        asking[0].cancel()
        await asyncio.wait(asking[:1])
        names.may_answer.set()
        first, *others = await asyncio.gather(*asking[1:])
        assert first == [v6(1), v4(1), v6(2), v6(3)]
        assert [order[0] for order in others] == [v4(1), v6(2), v6(3), v6(1)]
        assert sorted(others[0]) == sorted(first)
        assert asking[0].cancelled()
        assert names.asked == [("host", 443)]


async def test_addresses_are_forgotten_when_they_are_old_and_failures_at_once() -> None:
    now = [0.0]
    names = Names(UNKNOWN, [v4(1), v4(2)], [v4(3), v4(4)])
    with closing(Lookups(names, clock=lambda: now[0], kept_s=30)) as lookups:
        with pytest.raises(socket.gaierror):
            await lookups.addresses("host", 443)
        for now[0], expected in ((1.0, v4(1)), (30.9, v4(2)), (31.0, v4(3))):
            assert (await lookups.addresses("host", 443))[0] == expected
        assert len(names.asked) == 3
        await lookups.addresses("host", 80)
        assert names.asked[3] == ("host", 80)


async def test_failed_address_comes_last_until_the_next_lookup() -> None:
    now = [0.0]
    with closing(Lookups(Names([v4(1), v4(2), v4(3)]), clock=lambda: now[0], kept_s=30)) as lookups:
        await lookups.addresses("host", 443)
        lookups.failed("host", 443, [v4(2), v4(9)])
        orders = [await lookups.addresses("host", 443) for _ in range(3)]
        assert orders == [[v4(3), v4(1), v4(2)], [v4(1), v4(3), v4(2)], [v4(3), v4(1), v4(2)]]
        lookups.failed("host", 443, [v4(1), v4(3)])
        assert (await lookups.addresses("host", 443))[0] == v4(2)
        lookups.failed("host", 443, [v4(2)])
        assert (await lookups.addresses("host", 443))[2] == v4(2)
        now[0] = 30.0
        assert await lookups.addresses("host", 443) == [v4(1), v4(2), v4(3)]


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
async def test_ip_address_needs_no_lookup(host: str) -> None:
    names = Names(UNKNOWN)
    with closing(Lookups(names)) as lookups:
        lookups.failed(host, 443, [])
        assert await lookups.addresses(host, 443) == [v6(1) if ":" in host else v4(1)]
    assert names.asked == []


def test_slow_resolver_holds_up_no_close() -> None:
    names = Names(UNKNOWN)
    names.may_answer.clear()

    async def ask() -> None:
        async with client(names) as web:
            with pytest.raises(ReadTimeoutError, match="no connection within 1 seconds"):
                await web.get("http://host/")
            waiting = asyncio.ensure_future(web.get("http://host/"))
            await asyncio.sleep(0)
        with pytest.raises(LoaderClosedError):
            await waiting
        assert len(names.asked) == 1

    asyncio.run(ask())
    assert names.answered == []
    names.may_answer.set()


async def test_unknown_host_is_an_error_and_is_asked_for_again() -> None:
    names = Names(UNKNOWN, UNKNOWN)
    async with serving(ok(b"here")) as script, client(names) as web:
        names.answers[1] = [address_of(script)]  # type: ignore[call-overload]
        with pytest.raises(StorageError, match="no connection: Name or service not known"):
            await web.get("http://host/")
        await web.get("http://host/")
        assert (len(names.asked), script.fields()["host"]) == (2, "host")


async def test_connections_are_spread_over_the_addresses_that_answer() -> None:
    async with serving(ok(b"x" * 9)) as one, serving(ok(b"x" * 9)) as other:
        names = Names([REFUSES, address_of(one), address_of(other)])
        async with client(names) as web:
            for _ in range(7):  # whose bodies nobody reads, so that each has a connection of its own
                await web.get("http://host/")
        assert (one.connections, other.connections, len(names.asked)) == (4, 3, 1)


async def test_address_that_hangs_up_comes_last() -> None:
    met = []

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(writer.get_extra_info("sockname"))
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as one:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as other:
            places = [server.sockets[0].getsockname() for server in (one, other)]
            names = Names([*(Address(socket.AF_INET, place) for place in places), REFUSES])
            async with client(names) as web:
                for _ in range(4):
                    with pytest.raises(StorageError, match="no connection"):
                        await web.get("https://host/")
    assert met == places * 2


async def test_dial_gives_the_first_that_answers_or_the_last_error() -> None:
    with black_hole() as silent, socket.create_server(("127.0.0.1", 0)) as server:
        answers = Address(socket.AF_INET, server.getsockname())
        for addresses, expected in (([answers, silent], 0), ([REFUSES, silent, REFUSES, answers], 3)):
            sock, number = await dial(addresses)
            with sock:
                assert (number, sock.getpeername()) == (expected, answers.sockaddr)
                # Without it asyncio would hold small requests back.
                assert sock.proto == socket.IPPROTO_TCP
        with pytest.raises(ConnectionRefusedError):
            await dial([REFUSES, REFUSES])
        with pytest.raises(TimeoutError):  # the refusal of one ends no wait for another
            await asyncio.wait_for(dial([silent, REFUSES]), 0.5)


async def test_public_server_leads_only_to_the_public_ones_of_the_addresses_that_were_found() -> None:
    async with serving(ok(b"")) as private, serving(b"", ok(b""), host="127.0.0.2") as public:
        move = ok(b"", "Location: http://name/there", status="302 Moved")
        public.answers[0] = move
        names = Names([address_of(private), address_of(public)], [address_of(private)])
        async with client(names, is_public="127.0.0.2".__eq__) as web:
            await web.get(public.url)
            assert [head.split()[1] for head in public.requests] == ["/", "/there"]
        public.answers[:] = [move]
        async with client(names, is_public="127.0.0.2".__eq__) as web:
            with pytest.raises(BadResponseError, match="redirected to name, which is in a private network"):
                await web.get(public.url)
        assert (private.connections, len(names.asked)) == (0, 2)
