"""The store of an address, also of others' schemes, and addresses as they are shown: secrets in any part are hidden."""

from __future__ import annotations

import asyncio
import importlib.metadata
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

import headrace as hr
from headrace.errors import OptionError, masked, masked_text
from headrace.fetch import Reader
from headrace.fetch.stores import addresses as registry
from headrace.fetch.stores.addresses import Stores, host_of, split
from headrace.fetch.stores.object_stores import split_path
from headrace.options import Fetch
from headrace.types import Answer

CONTEXT = ssl.create_default_context()


@pytest.mark.parametrize(("url", "parts"), [
    ("/data/a b%20.tar", ("file", "file:", "/data/a b%20.tar")),
    ("data/x.tar", ("file", "file:", "data/x.tar")),
    ("C:\\data\\x.tar", ("file", "file:", "C:\\data\\x.tar")),
    ("run:7.tar", ("file", "file:", "run:7.tar")),
    ("file:///data/a%20b.tar", ("file", "file:", "/data/a b.tar")),
    ("file://localhost/data/x", ("file", "file:", "/data/x")),
    ("memory://a/b", ("memory", "memory:", "a/b")),
    ("s3://bucket/a/b?c#d%20", ("s3", "s3://bucket", "a/b?c#d%20")),
    ("gs://bucket/a", ("gs", "gs://bucket", "a")),
    ("hf://datasets/me/set/a.tar", ("hf", "hf:", "datasets/me/set/a.tar")),
    ("pipe:cat 'a b' | gzip -d", ("pipe", "pipe:", "cat 'a b' | gzip -d")),
    ("http://h:81/a%20b/c.tar#part", ("http", "http://h:81", "a%20b/c.tar")),
    ("HTTPS://u:p@h/c/a.tar?sv=1&sig=x%2F", ("https", "https://u:p@h", "c/a.tar?sv=1&sig=x%2F")),
    ("https://h?a=/b", ("https", "https://h", "?a=/b")),
    ("https://h/a//b/", ("https", "https://h", "a//b/")),
    ("shelf://place/a/b?c", ("shelf", "shelf://place", "a/b?c")),
])  # fmt: skip
def test_address_splits_into_root_and_path(url: str, parts: tuple[str, str, str]) -> None:
    assert split(url) == parts


@pytest.mark.parametrize(("path", "parts"), [
    ("a%20b/c.tar", ("https://h", "a b/c.tar")),
    ("c/a.tar?sv=1&sig=x%2F", ("https://h/?sv=1&sig=x%2F", "c/a.tar")),
    ("c%2Fa.tar?sig=x", ("https://h/c%2Fa.tar?sig=x", "")),
    ("a//b", ("https://h/a//b", "")),
    ("%ff.bin", ("https://h/%ff.bin", "")),
    ("a/", ("https://h/a/", "")),
])  # fmt: skip
def test_address_is_translated_for_obstore(path: str, parts: tuple[str, str]) -> None:
    assert split_path("https://h", path) == parts


@pytest.mark.parametrize(("settings", "hosts"), [
    ({"endpoint": "http://127.0.0.1:9000"}, ["http://127.0.0.1:9000"] * 2),
    ({"endpoint": "https://Minio.example/"}, ["https://minio.example"] * 2),
    ({}, [None, None]),
    ({"virtual_hosted_style_request": True}, [None, None]),
    ({"endpoint": "https://s3.cn-north-1.amazonaws.com.cn"}, [None, None]),
])  # fmt: skip
def test_buckets_have_the_host_of_the_endpoint_that_was_named(settings: dict[str, Any], hosts: list[str]) -> None:
    async def found() -> list[Any]:
        keys = {"access_key_id": "a", "secret_access_key": "b", "region": "eu-west-1"}
        stores = Stores(Fetch(), {**keys, "allow_http": True, **settings})
        try:
            opened = [stores.of(f"s3://{bucket}/x")[0] for bucket in ("one", "two")]
            assert host_of(opened[0]) == (hosts[0] or id(opened[0]))
            return [store.host for store in opened]  # type: ignore[attr-defined]
        finally:
            await stores.aclose()

    assert asyncio.run(found()) == hosts


@pytest.mark.parametrize(("url", "settings", "text"), [
    ("pipe:cat x", {}, "allow_pipe=True"),
    ("pipe://cat", {}, "allow_pipe=True"),
    ("file://other-host/data/x", {}, "names a host"),
    ("http://[bad/x", {}, "no address"),
    ("gs://b/x", {"ssl_context": CONTEXT, "skip_signature": "true"}, "root_certificate"),
])  # fmt: skip
def test_address_that_cannot_be_read_is_refused(url: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Stores(Fetch(), settings).of(url)


KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}


@pytest.mark.parametrize(("root", "settings", "kind"), [
    ("s3://b", {"skip_signature": "true"}, "S3Store"),
    ("s3a://b", KEYS, "S3Store"),
    ("s3://b", KEYS | {"request_payer": True}, "RemoteStore"),
    ("s3://b", KEYS | {"client_options": {"http2_only": True}}, "RemoteStore"),
    ("gs://b", {"skip_signature": "true"}, "RemoteStore"),
    ("az://b", {"account_name": "me", "skip_signature": "true"}, "RemoteStore"),
    ("abfss://b@me.dfs.core.windows.net", {"skip_signature": "true"}, "RemoteStore"),
    ("https://h", {"headers": {"a": "b"}, "client_options": {"allow_http": True}}, "WebStore"),
    ("https://h", {"ssl_context": CONTEXT}, "WebStore"),
    ("https://h", {"client_options": {"proxy_url": "http://p:1"}}, "RemoteWebStore"),
    ("http://h", {"client_options": {"allow_http": False}}, "RemoteWebStore"),
    ("hf://datasets", {}, "HuggingFaceStore"),
])  # fmt: skip
def test_every_address_has_the_store_that_can_read_it(root: str, settings: dict[str, Any], kind: str) -> None:
    store, path = Stores(Fetch(), settings).of(f"{root}/x/y")
    assert type(store).__name__ == kind
    assert path.endswith("x/y")


@pytest.mark.parametrize(
    ("url", "kind"), [("https://h/x", "RemoteWebStore"), ("s3://b/x", "RemoteStore"), ("hf://me/net/x", "FsspecStore")]
)
def test_proxy_selects_a_client_that_supports_it(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setattr("fsspec.get_filesystem_class", {"hf": AbstractFileSystem}.get)
    assert type(Stores(Fetch(), KEYS).of(url)[0]).__name__ == kind


def test_objects_with_one_root_share_a_store() -> None:
    stores = Stores(Fetch(), None)
    assert stores.of("http://h/a")[0] is stores.of("http://h/b?sig=x")[0]
    assert stores.of("http://h/a")[0] is not stores.of("http://g/a")[0]


@pytest.mark.process
def test_importing_the_fetch_stage_imports_no_client() -> None:
    names = "'obstore', 'fsspec', 'aiofiles', 'torch', 'aiohttp'"
    code = f"import sys, headrace.fetch; assert not [n for n in ({names}) if n in sys.modules]"
    subprocess.run([sys.executable, "-c", code], check=True)


SECRET = "hush7531"
NAMES = ["token", "pass", "code", "sas", "session", "bearer", "X-Amz-Signature", "%74oken", "%2574oken", "accessKey"]
PLANTED = [
    *(f"https://host/a.tar?n=1&{name}={SECRET}&m=2" for name in NAMES),
    f"https://me:{SECRET}@host/a.tar",
    f"https://{SECRET}@host/a.tar",
    *(f"https://me:1{mark}{SECRET}@host/a.tar" for mark in "/?#@:;&\\"),
    *(f"https://me:1@{mark}{SECRET}@host/a.tar" for mark in "/?#"),
    f"https:///me:{SECRET}@host/a.tar",
    f"HTTPS:me:{SECRET}@host/a.tar",
    f" https://me:{SECRET}@host/a.tar",
    f"https://me:{SECRET}@[::1]:80/a.tar",
    f"https://me:{SECRET}@[host/a.tar",
    f"https://host/a.tar#token={SECRET}",
    f"https://host/a.tar#{SECRET}",
    f"https://host/a.tar;token={SECRET}?n=1",
    f"https://host/a.tar?n=1;token={SECRET}",
    f"https://host/a.tar?token=1#{SECRET}",
    f"https://host/a.tar?token=1&{SECRET}",
    f"https://host/a.tar?token%3D{SECRET}",
    f"https://host/a.tar?n=1%26token%3D{SECRET}",
    f"https://host/a.tar?url=https://me:{SECRET}@other/",
    f"https://host/a.tar?url=https%3A%2F%2Fme%3A{SECRET}%40other%2F",
    f"https://host/a.tar?url=https%3A%2F%2Fother%2F%3Fsig%3D{SECRET}",
    f"simplecache::https://me:{SECRET}@host/a.tar",
    f"zip://a.csv::simplecache::https://host/a.zip?token={SECRET}",
    f"file://me:{SECRET}@host/a.tar",
    f"s3://me:{SECRET}@bucket/a.tar",
    f"abfs://me:{SECRET}@account/a.tar",
    f"pipe:TOKEN={SECRET} fetch a.tar",
    f"PIPE:curl -H {SECRET} https://host/a.tar",
    f" pipe:curl {SECRET}",
    f"pipe:https://me:{SECRET}@host",
]
SHOWN = {
    "": "",
    "a.tar": "a.tar",
    "some where/a@b#1.tar": "some where/a@b#1.tar",
    "file:///data/a@b.tar": "file:///data/a@b.tar",
    "s3://bucket/a@b.tar": "s3://bucket/a@b.tar",
    "hf://datasets/me/net@main/a.tar": "hf://datasets/me/net@main/a.tar",
    "abfs://container@account/a.tar": "abfs://container@account/a.tar",
    "http://[::1]:80/a.tar?n=1": "http://[::1]:80/a.tar?n=1",
    "https://cdn/npm/a@1.2/a.tar": "https://cdn/npm/a@1.2/a.tar",
    "http://minio:9000/a/b@2x.png": "http://minio:9000/a/b@2x.png",
    "http://me:1@host.org/a@2.tar?to=me@host.org": "http://host.org/a@2.tar?to=me@host.org",
    "https://me:1@host/a.tar?n=1&token=2&m=3": "https://host/a.tar?n=1&token=***&m=3",
    "https://me:1/2@host/a.tar": "https://***@host/a.tar",
    "https://host/a;session=1/b.tar#token=2": "https://host/a;session=***/b.tar#token=***",
    "pipe:curl https://host/a.tar": "pipe:curl …",
    "pipe:make-shard": "pipe:make-shard",
}


@pytest.mark.parametrize("url", PLANTED)
def test_secret_in_any_part_of_an_address_is_hidden(url: str) -> None:
    assert SECRET not in masked(url)
    if not url.lower().lstrip().startswith(("pipe:", "https:me", "zip:", "simplecache:", "file:")):
        assert SECRET not in masked_text(f"KeyError: cannot get '{url}' ({url})")


@pytest.mark.parametrize(("url", "shown"), SHOWN.items())
def test_text_without_secrets_is_unchanged(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert masked(shown) == shown


def test_long_addresses_are_masked_quickly() -> None:
    for odd in ("?", "%25", "&token=", "::", "@/", "://@", ";a=", "#%3F"):
        masked("https://host/" + odd * 10_000)


class Echo:
    """A store whose objects are what they are asked by."""

    def __init__(self, root: str, storage_options: Mapping[str, Any]) -> None:
        self._about = f"{root} {sorted(storage_options)}"

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        body = f"{path} of {self._about}".encode()
        return Answer(0, len(body), len(body), None, self._one(body))

    async def _one(self, body: bytes) -> AsyncIterator[bytes]:
        yield body

    async def aclose(self) -> None: ...


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.mark.asyncio
async def test_registered_scheme_is_read_by_its_store() -> None:
    hr.plugins.register_store("echo", Echo)
    async with Reader(concurrency=1, storage_options={"colour": 1}) as reader:
        assert await reader.read("echo://place/a/b?c") == b"a/b?c of echo://place ['colour']"


class Here(Echo):
    is_local = True


@pytest.mark.parametrize(("store", "kept"), [(Here, 0), (Echo, 1)], ids=["local", "far"])
def test_local_registered_store_is_not_cached(tmp_path: Path, store: type[Echo], kept: int) -> None:
    async def read() -> None:
        async with Reader(hr.Fetch(cache_dir=tmp_path), concurrency=1) as reader:
            await reader.read("echo://place/a")

    hr.plugins.register_store("echo", store)
    asyncio.run(read())
    assert len(list(tmp_path.rglob("*.range"))) == kept


@pytest.mark.asyncio
async def test_registered_scheme_wins_over_fsspec() -> None:
    assert fsspec.get_filesystem_class("ftp") is not None
    hr.plugins.register_store("ftp", Echo)
    assert (await hr.read("ftp://host/x")).startswith(b"x of ftp://host")


@pytest.mark.asyncio
async def test_entry_point_names_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("echo", f"{__name__}:Echo", "headrace.stores")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: Echo)
    monkeypatch.setattr(registry, "entry_points", lambda group, name: [entry] if name == entry.name else [])
    assert (await hr.read("echo://place/x")).startswith(b"x of echo://place")


@pytest.mark.parametrize("scheme", ["s3", "https", "file", "hf", "pipe", "memory", "Shelf", "a", "1a", "a b", ""])
def test_built_in_or_invalid_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(hr.OptionError, match="scheme="):
        hr.plugins.register_store(scheme, Echo)
