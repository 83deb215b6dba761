"""Storage options as obstore's users write them; what does not fit is named, and what panics ends one read."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from builders.tars import numbered_samples, tar
from network.bodies import OBSTORE_KEEPS

import headrace as hr
from headrace.errors import OptionError, StorageError
from headrace.fetch.stores import addresses as registry
from headrace.fetch.stores.addresses import for_obstore
from headrace.options import Fetch
from headrace.testing import FaultServer
from headrace.types import Answer

KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
ONCE = Fetch(attempts=1)
BY_OBSTORE = {"http1_only": True}  # our own client does not know it
ALLOWED: list[dict[str, Any]] = [
    {"allow_http": "true"},
    {"allow_http": True},
    {"ALLOW_HTTP": "TRUE"},
    {"aws_allow_http": "1"},
    {"AWS_ALLOW_HTTP": "on"},
    {"client_options": {"allow_http": "True"}},
    {"client_options": {"ALLOW_HTTP": True}},
    {"allow_http": "true", "client_options": {"allow_http": True}},
    {"timeout": "30s", "aws_connect_timeout": "5s", "user_agent": "me"},
]

pytestmark = OBSTORE_KEEPS


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        server.add("shelf/a.tar", tar(numbered_samples(0, 9)))
        yield server


def read(url: str, **options: Any) -> list[Any]:
    data = hr.stream(url, storage_options=options).to_tuple("__key__")
    with hr.DataLoader(data, batch_size=None, fetch=ONCE) as loader:
        return list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("by_obstore", [False, True])
@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_spellings_of_a_client_setting_are_known(
    options: dict[str, Any], by_obstore: bool, server: FaultServer
) -> None:
    if by_obstore:
        options = {**options, "client_options": {**options.get("client_options", {}), **BY_OBSTORE}}
    assert len(read("s3://shelf/a.tar", **KEYS, endpoint=server.url, **options)) == 9


def test_settings_of_the_client_are_the_same_in_either_place() -> None:
    there = {"region": "x", "client_options": {"allow_http": True, "timeout": "5s"}}
    assert for_obstore({"region": "x", "AWS_Allow_HTTP": "yes", "timeout": "5s"}) == there
    assert for_obstore(there) == there
    assert for_obstore({"azure_allow_http": "false"}) == {"client_options": {"allow_http": False}}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"allow_http": "perhaps"}, "'allow_http'='perhaps' must be true or false"),
        ({"client_options": {"allow_http": "perhaps"}}, r"client_options\['allow_http'\]='perhaps' must be true"),
        ({"client_options": "allow_http=true"}, r"'client_options'\]=.* must be a dict"),
        ({"allow_http": "true", "aws_allow_http": "false"}, r"'allow_http' twice"),
        ({"skip_signature": "perhaps"}, r"storage_options\['skip_signature'\] does not fit 's3://shelf'"),
        ({"region": 5}, r"storage_options\['region'\] does not fit"),
        ({"no_such_setting": "x"}, r"storage_options\['no_such_setting'\] does not fit"),
        ({"timeout": "soon", **BY_OBSTORE}, r"do not fit 's3://shelf'.*soon"),
        ({"endpoint": 5}, "endpoint"),
        ({"endpoint": "::nowhere"}, r"storage_options\['endpoint'\] does not fit"),
    ],
    ids=str,
)
def test_setting_that_does_not_fit_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        read("s3://shelf/a.tar", **{**KEYS, "endpoint": "http://127.0.0.1:9", **options})


class Panics:
    """A store whose library in Rust panics: a real panic, of obstore's."""

    def __init__(self, where: str) -> None:
        self._where = where

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        if self._where == "asking":
            self._panic()
        return Answer(0, 1, 1, None, self._body())

    async def _body(self) -> Any:
        self._panic()
        yield b""

    async def aclose(self) -> None:
        pass

    def _panic(self) -> None:
        from obstore.store import from_url

        from_url("s3://shelf", config={"aws_allow_http": "true"})  # type: ignore[call-overload]


def opened(root: str, storage_options: Mapping[str, Any]) -> Panics:
    store = Panics(storage_options["where"])
    if storage_options["where"] == "opening":
        store._panic()
    return store


@pytest.mark.slow
@pytest.mark.parametrize("where", ["opening", "asking", "body"])
def test_panic_of_a_store_is_one_error(where: str, monkeypatch: pytest.MonkeyPatch, server: FaultServer) -> None:
    monkeypatch.setitem(registry._registered, "panics", opened)

    stream = hr.stream("panics://me:secret@shelf/x.tar", storage_options={"where": where}, index=None)
    with hr.DataLoader(stream, batch_size=1, fetch=ONCE) as loader:
        for _ in range(2):
            with pytest.raises(StorageError, match=r"Rust.*panicked: Expected config prefix") as caught:
                list(loader)
            assert caught.value.url == "panics://shelf/x.tar"
            assert str(caught.value).startswith("Stores" if where == "opening" else "Panics")
            assert "secret" not in str(caught.value)


def test_reads_beside_a_panic_go_on(monkeypatch: pytest.MonkeyPatch, server: FaultServer) -> None:
    monkeypatch.setitem(registry._registered, "panics", opened)
    url = f"{server.url}/shelf/a.tar"

    class Some(hr.AsyncDataset):
        storage_options = {"where": "asking"}

        def __len__(self) -> int:
            return 20

        async def aget(self, index: int) -> int:
            return len(await hr.read("panics://shelf/x" if index == 5 else url, 0, index + 1))

    with hr.DataLoader(Some(), batch_size=1, fetch=ONCE, errors=hr.Skip()) as loader:
        for _ in range(2):
            assert [int(x) for batch in loader for x in batch] == [n for n in range(1, 21) if n != 6]
