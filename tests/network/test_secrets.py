"""Secrets are in no error and in no argument of a process."""

import asyncio
import base64
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from network.bodies import OBSTORE_KEEPS

from headrace.errors import HeadraceError, OptionError
from headrace.fetch import Reader
from headrace.fetch.stores.object_stores import open_remote
from headrace.options import Fetch
from headrace.testing import FaultServer

SECRET = "hush7531"
KEYS = {"access_key_id": "a", "secret_access_key": SECRET, "session_token": SECRET, "region": "us-east-1"}
BY_OBSTORE = {"client_options": {"http1_only": True, "default_headers": {"Authorization": f"Bearer {SECRET}"}}}
FAULTS = ["s403", "s404", "s500", "expired", "slowdown", "redirect:mode=loop", "reset_pre", "wrong_range", "bad_head"]

pytestmark = OBSTORE_KEEPS


class Talkative(AbstractFileSystem):
    """Puts all options into its errors, as clients of stores do."""

    protocol = "talkative"

    def __init__(self, fails: str = "", **options: Any) -> None:
        super().__init__()
        self.told = f"no luck with {options} at https://me:{SECRET}@host/x?sig={SECRET}, Authorization: Bearer {SECRET}"
        if fails == "opening":
            raise ValueError(self.told)
        self.error = TimeoutError if fails == "in time" else KeyError

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        raise self.error(self.told)


SSE_C = {"sse_customer_key_base64": base64.b64encode(SECRET.encode() * 4).decode(), "server_side_encryption": "sse-c"}


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        for fault in FAULTS:
            server.add(f"shelf/{fault}", b"x" * 1000, fault)
            server.add(f"me/net/resolve/main/{fault}", b"x" * 1000, fault)
        server.add("shelf/away", b"x" * 1000, "redirect:mode=other")
        yield server


def failures(url: str, storage_options: dict[str, Any]) -> str:
    async def run() -> HeadraceError:
        options = Fetch(attempts=2, backoff_s=0.0, allow_pipe=True)
        async with Reader(options, concurrency=1, storage_options=storage_options) as reader:
            with pytest.raises(HeadraceError) as caught:
                await reader.read(url, 1, 100)
            assert SECRET not in repr([reader, reader._stores, *reader._stores._opened.values()])
            return caught.value

    error = asyncio.run(run())
    again = pickle.loads(pickle.dumps(error))
    return "".join(
        [repr(error), repr(again), repr(vars(again)), str(pickle.dumps(error)), *traceback.format_exception(error)]
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("http://me:{secret}@{host}/shelf/{fault}", {"headers": {"X-Api-Key": SECRET}}),
        ("{url}/shelf/{fault}?X-Amz-Signature={secret}", BY_OBSTORE),
        ("s3://shelf/{fault}", {**KEYS, "endpoint": "{url}", "headers": {"X-Api-Key": SECRET}}),
        ("s3://shelf/{fault}", {**KEYS, **BY_OBSTORE, "endpoint": "{url}"}),
        ("hf://me/net/{fault}", {"endpoint": "{url}", "token": SECRET}),
    ],
    ids=["web", "web-obstore", "s3", "s3-obstore", "hf"],
)
def test_failed_read_tells_no_secret(address: str, options: dict[str, Any], fault: str, server: FaultServer) -> None:
    url = address.format(url=server.url, host=server.url.removeprefix("http://"), fault=fault, secret=SECRET)
    options = {name: server.url if value == "{url}" else value for name, value in options.items()}
    assert SECRET not in failures(url, options)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://shelf/x", {**KEYS, "no_such_option": SECRET}),
        ("s3://shelf/a//b", KEYS),
        ("gs://shelf/x", {"service_account_key": f'{{"private_key": "{SECRET}"}}'}),
        ("az://shelf/x", {"account_name": "me", "account_key": SECRET}),
        ("http://h/x", {"headers": {"X-Api-Key": f"{SECRET}\r\n"}}),
        (f"http://me:{SECRET}@[h/x", {}),
        (f"http://me:{SECRET}@h:port/x", BY_OBSTORE),
        ("hf://me/net", {"token": SECRET}),
        ("talkative://me/x", {"client_key": SECRET, "nested": {"password": SECRET}}),
        ("talkative://me/x", {"client_key": SECRET, "fails": "opening"}),
        ("talkative://me/x", {"client_key": SECRET, "fails": "in time"}),
        (f"pipe:echo 'Authorization: Bearer {SECRET}' --token {SECRET} https://h/?sig={SECRET} >&2; exit 3", {}),
        (f"pipe:exit 3 # {SECRET}", {}),
        (f"pipe:TOKEN={SECRET} exit 3", {}),
        (f"PIPE:false {SECRET}", {}),
        (f"file://me:{SECRET}@host/x", {}),
        (f"memory:/me:{SECRET}@host/x", {}),
        (f"https:me:{SECRET}@host/x", {}),
        (f"talkative://me:{SECRET}@host/x", {"client_key": SECRET}),
        (f"simplecache::talkative://me:{SECRET}@host/x", {"client_key": SECRET}),
        (f"simplecache::http://me:{SECRET}@127.0.0.1:1/x", {}),
        (f"s3://me:{SECRET}@shelf/x", {**KEYS, "no_such_option": SECRET}),
    ],
)
def test_refused_option_or_address_tells_no_secret(url: str, options: dict[str, Any]) -> None:
    fsspec.register_implementation("talkative", Talkative, clobber=True)
    assert SECRET not in failures(url, options)


@pytest.mark.parametrize(
    ("url", "options", "is_refused"),
    [
        ("{url}/shelf/away", {"headers": {"X-Api-Key": SECRET}}, False),
        ("{url}/shelf/away", BY_OBSTORE, False),
        ("{url}/shelf/away", {"client_options": {"http1_only": True}, "headers": {"X-Api-Key": SECRET}}, True),
        ("s3://shelf/away", {**KEYS, "endpoint": "{url}", "headers": {"X-Api-Key": SECRET}}, False),
        ("s3://shelf/away", {**KEYS, "endpoint": "{url}", **SSE_C}, True),
        ("gs://shelf/away", {"base_url": "{url}", "headers": {"X-Goog-Token": SECRET}, "skip_signature": True}, True),
    ],
)
def test_redirect_takes_no_secret(url: str, options: dict[str, Any], is_refused: bool, server: FaultServer) -> None:
    async def run() -> None:
        here = {name: server.url if value == "{url}" else value for name, value in options.items()}
        async with Reader(Fetch(attempts=1), concurrency=1, storage_options=here) as reader:
            if is_refused:
                with pytest.raises(OptionError, match="wherever a redirect leads"):
                    await reader.read(url.format(url=server.url), 1, 100)
            else:
                assert await reader.read(url.format(url=server.url), 1, 100) == b"x" * 99

    before = len(server.requests_for("shelf/away"))
    asyncio.run(run())
    asked = server.requests_for("shelf/away")[before:]
    assert [request.elsewhere for request in asked] == ([] if is_refused else [False, True])
    assert not any(SECRET in str(request) for request in asked if request.elsewhere)


@pytest.mark.parametrize("endpoint", ["", "https://s3.eu-west-1.amazonaws.com", "https://bucket.s3.amazonaws.com/x"])
def test_key_of_an_object_goes_to_the_clouds_own_servers(endpoint: str) -> None:
    settings = {**KEYS, **SSE_C, **({"endpoint": endpoint} if endpoint else {})}
    assert open_remote("s3://shelf", Fetch(), settings) is not None
    for other in (
        "http://s3.amazonaws.com",
        "https://s3.amazonaws.com.example.org",
        "https://example.org/.amazonaws.com/",
    ):
        with pytest.raises(OptionError, match="sse_customer_key_base64 wherever"):
            open_remote("s3://shelf", Fetch(), {**settings, "endpoint": other})
