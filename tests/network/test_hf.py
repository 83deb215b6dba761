"""Files on Hugging Face's hub: a hub that redirects to signed addresses of a second server."""

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from headrace.errors import AccessDeniedError, OptionError
from headrace.fetch.stores.hf import HuggingFaceStore
from headrace.fetch.web.client import Web
from headrace.fetch.web.connections import Connections
from headrace.options import Fetch
from headrace.testing import FaultServer

BODY = bytes(range(256)) * 100
TOKEN = "hf_do_not_tell"
FILE = "datasets/me/set/train/a b.bin"


class Hub(ThreadingHTTPServer):
    """Redirects requests with the token to `storage`, each time to another address."""

    def __init__(self, storage: str) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.storage = storage
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            self.send_response(302)
            self.send_header("Location", f"{self.server.storage}/blob?Signature=s{len(self.server.asked)}")
        else:
            self.send_response(401)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def storage() -> Iterator[FaultServer]:
    with FaultServer() as server:
        server.add("blob", BODY)
        yield server


@pytest.fixture
def hub(storage: FaultServer) -> Iterator[Hub]:
    with Hub(storage.url) as hub:
        thread = Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def read(hub: Hub, *paths: str, clock: Clock | None = None, step_s: float = 0.0, **options: Any) -> list[bytes]:
    """The files' second hundred bytes, read one after the other by one store."""
    clock = clock or Clock()

    async def run() -> list[bytes]:
        connections = Connections(Fetch())
        store = HuggingFaceStore(
            {"endpoint": hub.url, **options}, Web(connections), headers={"X-Own": "1"}, clock=clock
        )
        bodies = []
        try:
            for path in paths:
                answer = await store.get(path, 100, 200)
                bodies.append(b"".join([bytes(piece) async for piece in answer.chunks]))
                clock.now += step_s
        finally:
            await connections.aclose()
        assert TOKEN not in repr(store)
        return bodies

    return asyncio.run(run())


def test_hub_is_asked_once_and_other_origins_get_no_secrets(hub: Hub, storage: FaultServer) -> None:
    assert read(hub, *[FILE] * 5, token=TOKEN, step_s=120.0) == [BODY[100:200]] * 5
    assert hub.asked == ["/datasets/me/set/resolve/main/train/a%20b.bin"] * 2
    assert [request.target for request in storage.log] == [f"/blob?Signature=s{n}" for n in (1, 1, 1, 2, 2)]
    assert not {"authorization", "x-own"} & {name for request in storage.log for name in request.headers}


@pytest.mark.parametrize("fault", ["s403", "s401", "expired"])
def test_signed_address_that_is_refused_is_renewed_once(fault: str, hub: Hub, storage: FaultServer) -> None:
    storage.add("blob", BODY, f"{fault}:only=2")
    assert read(hub, FILE, FILE, token=TOKEN) == [BODY[100:200]] * 2
    assert [request.target[-2:] for request in storage.log] == ["s1", "s1", "s2"]


def test_refusal_of_the_hub_is_an_error_without_the_token(hub: Hub) -> None:
    with pytest.raises(AccessDeniedError, match="hf://datasets/me/set") as caught:
        read(hub, FILE, token="hf_wrong_one")
    assert "hf_wrong_one" not in str(caught.value)
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("datasets/me/set@v1.0/a.tar", "/datasets/me/set/resolve/v1.0/a.tar"),
        ("datasets/me/set@refs/pr/7/x/a.tar", "/datasets/me/set/resolve/refs%2Fpr%2F7/x/a.tar"),
        ("datasets/me/set@refs%2Fpr%2F7/a.tar", "/datasets/me/set/resolve/refs%2Fpr%2F7/a.tar"),
        ("models/me/net/a?b#c%20d@e", "/me/net/resolve/main/a%3Fb%23c%2520d%40e"),
        ("me/net/x/ü.bin", "/me/net/resolve/main/x/%C3%BC.bin"),
        ("spaces/me/app/a.py", "/spaces/me/app/resolve/main/a.py"),
    ],
)
def test_path_names_a_file_of_a_revision(path: str, asked: str, hub: Hub) -> None:
    read(hub, path, token=TOKEN)
    assert hub.asked == [asked]


@pytest.mark.parametrize("path", ["datasets/me/set", "me/net", "datasets/me", ""])
def test_path_without_a_file_is_refused(path: str, hub: Hub) -> None:
    with pytest.raises(OptionError, match="hf://datasets/ORGANISATION"):
        read(hub, path)


@pytest.mark.parametrize(
    ("variable", "file"),
    [("HF_TOKEN", None), ("HF_TOKEN_PATH", "t"), ("HF_HOME", "token"), ("HOME", ".cache/huggingface/token")],
)
def test_token_is_found_where_the_hubs_own_library_has_it(
    variable: str, file: str | None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    value = TOKEN
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{TOKEN}\n")
        value = str(tmp_path / file if variable == "HF_TOKEN_PATH" else tmp_path)
    monkeypatch.setenv(variable, value)
    assert read(hub, FILE) == [BODY[100:200]]
    with pytest.raises(AccessDeniedError):
        read(hub, FILE, token=False)


def test_endpoint_is_taken_from_the_environment(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    assert read(hub, FILE, endpoint=None, token=TOKEN) == [BODY[100:200]]
