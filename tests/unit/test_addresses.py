"""Addresses: their stores, as they are shown without secrets, listed in ranges, and surveyed when they are many."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import ssl
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import BadResponseError, OptionError, masked, masked_text
from headrace.fetch import Reader
from headrace.fetch.stores import addresses as registry
from headrace.fetch.stores.addresses import Stores, host_of, split
from headrace.fetch.stores.key_ranges import list_in_ranges
from headrace.fetch.stores.object_stores import split_path
from headrace.formats.registry import format_of
from headrace.options import Fetch
from headrace.sources import kinds
from headrace.sources.kinds import MEDIA, Survey, extension_of, kept_survey, kind_in, stem_of, survey_to_keep, surveyed
from headrace.types import Answer, Listed

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
@pytest.mark.parametrize("scheme", ["echo", "ftp"])  # the second is known to fsspec, too
async def test_registered_scheme_is_read_by_its_store(scheme: str) -> None:
    hr.plugins.register_store(scheme, Echo)
    async with Reader(concurrency=1, storage_options={"colour": 1}) as reader:
        assert await reader.read(f"{scheme}://place/a/b?c") == f"a/b?c of {scheme}://place ['colour']".encode()


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
async def test_entry_point_names_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("echo", f"{__name__}:Echo", "headrace.stores")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: Echo)
    monkeypatch.setattr(registry, "entry_points", lambda group, name: [entry] if name == entry.name else [])
    assert (await hr.read("echo://place/x")).startswith(b"x of echo://place")


@pytest.mark.parametrize("scheme", ["s3", "https", "file", "hf", "pipe", "memory", "Shelf", "a", "1a", "a b", ""])
def test_built_in_or_invalid_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(hr.OptionError, match="scheme="):
        hr.plugins.register_store(scheme, Echo)


class Bucket:
    """Gives its keys in pages. Counts the requests, and how many are open at once."""

    def __init__(
        self, keys: Sequence[str], size: int, *, knows_after: bool = True, entry: Callable[[str], Listed] = Listed
    ) -> None:
        self.keys, self.size, self.knows_after, self.entry = keys, size, knows_after, entry
        self.requests = self.at_once = self.most = 0

    async def pages(self, after: str | None) -> AsyncGenerator[list[Listed], None]:
        first = 0 if after is None or not self.knows_after else bisect_right(self.keys, after)
        for at in range(first, max(len(self.keys), first + 1), self.size):
            self.requests += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
            finally:
                self.at_once -= 1
            if page := self.keys[at : at + self.size]:
                yield [self.entry(key) for key in page]

    def listed(self) -> list[str]:
        async def collect() -> list[str]:
            async with aclosing(list_in_ranges(self.pages, self.size)) as pages:
                return [one.path async for page in pages for one in page]

        return asyncio.run(collect())


def with_folders(key: str) -> Listed:
    """An object for a folder is empty and without its slash, as obstore lists it."""
    return Listed(key.removesuffix("/"), int(not key.endswith("/")))


_KEYS = st.lists(st.text("059afzAZ/-.é~", min_size=1, max_size=8), unique=True, max_size=200).map(sorted)


@given(keys=_KEYS, size=st.integers(1, 4))
def test_listing_in_ranges_has_each_key_once(keys: list[str], size: int) -> None:
    assert sorted(Bucket(keys, size).listed()) == keys


@given(
    keys=st.lists(st.text("01/-.", min_size=1, max_size=5).map(lambda text: f"{text}1"), unique=True, max_size=99),
    size=st.integers(1, 4),
)
def test_objects_for_folders_are_skipped(keys: list[str], size: int) -> None:
    keys = [key for key in keys if "//" not in key and key[0] != "/"]
    folders = {key[: at + 1] for key in keys for at, sign in enumerate(key) if sign == "/"}
    assert sorted(Bucket(sorted({*keys, *folders}), size, entry=with_folders).listed()) == sorted(keys)


def test_folder_names_that_sort_before_a_slash_are_listed_in_ranges() -> None:
    keys = [f"class{k}{end}/{n:02d}" for k in range(90) for n in range(20) for end in ("", "-big", " x")]
    folders = {f"{key.partition('/')[0]}/" for key in keys}
    bucket = Bucket(sorted({*keys, *folders}), 20, entry=with_folders)
    assert sorted(bucket.listed()) == sorted(keys)
    assert bucket.most >= 8


@pytest.mark.parametrize(
    "name", ["photo-{:010d}.jpg", "{:x}", "class-{0:.1}/photo-{0}.jpg", "2024/{:06d}/a", "é{:05d}"]
)
def test_many_keys_are_listed_concurrently(name: str) -> None:
    keys = sorted({name.format(k if "." not in name[:12] else str(k)) for k in range(20_000)})
    bucket = Bucket(keys, 20)
    assert sorted(bucket.listed()) == keys
    assert bucket.most >= 8
    assert bucket.requests < 2.5 * len(keys) / 20


def test_few_keys_and_empty_objects_are_listed_without_more_requests() -> None:
    bucket = Bucket([f"{k:04d}" for k in range(380)], 100)
    assert bucket.listed() == bucket.keys
    assert bucket.requests == 4
    empty = Bucket([f"{k:04d}" for k in range(2000)], 10, entry=lambda key: Listed(key, 0))
    assert sorted(empty.listed()) == empty.keys


@pytest.mark.parametrize(("factor", "requests"), [(1, 21), (7919, 20)], ids=["ordered", "without order"])
def test_store_without_order_is_listed_sequentially(factor: int, requests: int) -> None:
    bucket = Bucket([f"{k * factor % 2000:04d}" for k in range(2000)], 100, knows_after=False)
    assert bucket.listed() == bucket.keys
    assert bucket.most == 1
    assert bucket.requests == requests


def test_keys_that_are_out_of_order_later_are_an_error() -> None:
    keys = [f"{k:05d}" for k in range(5000)]
    keys[700], keys[790] = keys[790], keys[700]
    with pytest.raises(BadResponseError, match="out of order"):
        Bucket(keys, 10).listed()


def test_error_ends_the_listing_and_its_requests() -> None:
    class Failing(Bucket):
        async def pages(self, after: str | None) -> AsyncGenerator[list[Listed], None]:
            async for page in super().pages(after):
                if after is not None and page[-1].path > "00150":
                    raise OSError("no more")
                yield page

    bucket = Failing([f"{k:05d}" for k in range(5000)], 10)
    with pytest.raises(OSError, match="no more"):
        bucket.listed()
    assert bucket.at_once == 0


_LAST = st.sampled_from(
    [
        "a", "b", "a.jpg", "a.JPG", "a.json", "a.b.jpg", "b.tar", "b.tar.gz", "c.tgz", ".x", ".", "a.", "x.gz",
        "é.tar", "metadata.csv", "metadata.jsonl", "xmetadata.csv", "metadata.CSV", "a.longextension", "a.é",
        "part-0", "c.txt.zst", "c.json.gz", "c.00.GZ",
    ]
)  # fmt: skip
_PATHS = st.builds(
    lambda folders, last: "/".join([*folders, last]), st.lists(st.sampled_from(["d", "e.f", "é"])), _LAST
)


def one_by_one(names: list[str], start: int) -> Survey:
    forms = [format_of([name]) for name in names]
    paths = [name[start:] for name in names]
    return Survey(
        formats=Counter(form.name for form in forms if form is not None),
        others=Counter(kind_in(name) for name, form in zip(names, forms, strict=True) if form is None),
        extensions=Counter(map(extension_of, names)),
        media=sum(extension_of(name) in MEDIA for name in names),
        tables=[name for name in names if re.fullmatch(r"(.*/)?metadata\.(csv|jsonl|parquet)", name)],
        folders=sorted({path.partition("/")[0] for path in paths if "/" in path}),
        loose=sum("/" not in path for path in paths),
        is_single=all(stem_of(a) != stem_of(b) for a, b in pairwise(names)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "memory://place/ä/"])
@given(paths=st.lists(_PATHS, max_size=12), in_order=st.booleans())
def test_survey_equals_a_survey_of_each_name(folder: str, paths: list[str], in_order: bool) -> None:
    names = [folder + path for path in (sorted(paths) if in_order else paths)]
    found = surveyed(names, len(folder))
    expected = one_by_one(names, len(folder))
    expected.digest = found.digest
    found.tables.sort()
    expected.tables.sort()
    assert found == expected
    assert kept_survey(json.loads(json.dumps(survey_to_keep(found)))) == found


def test_survey_is_the_same_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"f/{k // 4}/{k // 2:03d}.{'jt'[k % 2]}" for k in range(40)]
    whole = surveyed(names, 2)
    assert not whole.is_single
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(kinds, "_CHUNK", size)
        assert surveyed(names, 2) == whole


def test_digest_depends_on_relative_paths_and_their_order() -> None:
    here, there = (surveyed([f"{place}a/1", f"{place}b/2"], len(place)) for place in ("s3://x/", "/y/z/w/"))
    assert here.digest == there.digest
    assert len({surveyed(names, 0).digest for names in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])}) == 4


def test_survey_by_other_formats_is_not_used() -> None:
    stored = survey_to_keep(surveyed(["a.tar"], 0))
    assert stored is not None
    assert kept_survey({**stored, "by": "others"}) is None
    assert kept_survey(None) is None
