"""Which store an address belongs to, and what importing the fetch stage costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.fetch import stores as stores_module
from headrace.fetch.stores import Stores, split
from headrace.options import FetchOptions


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("/data/a b%20.tar", ("file", "file:", "/data/a b%20.tar")),
        ("data/x.tar", ("file", "file:", "data/x.tar")),
        ("C:\\data\\x.tar", ("file", "file:", "C:\\data\\x.tar")),
        ("run:7.tar", ("file", "file:", "run:7.tar")),
        ("file:///data/a%20b.tar", ("file", "file:", "/data/a b.tar")),
        ("file://localhost/data/x", ("file", "file:", "/data/x")),
        ("memory://a/b", ("memory", "memory:", "a/b")),
        ("s3://bucket/a/b?c#d%20", ("s3", "s3://bucket", "a/b?c#d%20")),
        ("gs://bucket/a", ("gs", "gs://bucket", "a")),
        ("hf://datasets/me/set/a.tar", ("hf", "hf://datasets", "hf://datasets/me/set/a.tar")),
        ("http://h:81/a%20b/c.tar#part", ("http", "http://h:81", "a b/c.tar")),
        ("https://h/c/a.tar?sv=1&sig=x%2F", ("https", "https://h/?sv=1&sig=x%2F", "c/a.tar")),
        ("https://h/c%2Fa.tar?sig=x#part", ("https", "https://h/c%2Fa.tar?sig=x", "")),
        ("https://h/a//b", ("https", "https://h/a//b", "")),
        ("https://h/%ff.bin", ("https", "https://h/%ff.bin", "")),
        ("https://h/a/", ("https", "https://h/a/", "")),
    ],
)
def test_address_splits_into_root_and_path(url: str, parts: tuple[str, str, str]) -> None:
    assert split(url) == parts


@given(st.from_regex(r"http://[a-z.:0-9]{1,8}/[-A-Za-z0-9_.~/%?#]{0,12}", fullmatch=True))
def test_plain_addresses_split_as_all_others_do(url: str) -> None:
    try:
        expected = stores_module._split_web(url)
    except ValueError:
        return
    assert split(url) == ("http", *expected)


@pytest.mark.parametrize("url", ["pipe:cat x", "pipe://cat", "file://other-host/data/x", "http://[bad/x"])
def test_address_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(OptionError):
        Stores(FetchOptions(), None).of(url)


@pytest.mark.parametrize("root", ["s3://b", "s3a://b", "gs://b", "az://b", "abfss://b@me.dfs.core.windows.net"])
def test_every_cloud_has_a_store(root: str) -> None:
    settings = {"skip_signature": "true", **({"account_name": "me"} if root.startswith("a") else {})}
    store, path = Stores(FetchOptions(), settings).of(f"{root}/x/y")
    assert type(store).__name__ == "RemoteStore"
    assert path == "x/y"


def test_objects_with_one_root_share_a_store() -> None:
    stores = Stores(FetchOptions(), None)
    assert stores.of("http://h/a")[0] is stores.of("http://h/b")[0]
    assert stores.of("http://h/a?sas")[0] is stores.of("http://h/b?sas")[0]
    assert stores.of("http://h/a?sas")[0] is not stores.of("http://h/a?other")[0]


def test_stores_of_signed_addresses_are_bounded() -> None:
    stores = Stores(FetchOptions(), None)
    first = stores.of("http://h/a?sig=0")[0]
    for n in range(1, 70):
        stores.of(f"http://h/a?sig={n}")
    assert stores.of("http://h/a?sig=0")[0] is not first
    assert len(stores._passing) == 64


def test_importing_the_fetch_stage_imports_no_client() -> None:
    names = "'obstore', 'fsspec', 'aiofiles', 'torch', 'aiohttp'"
    code = f"import sys, headrace.fetch; assert not [n for n in ({names}) if n in sys.modules]"
    subprocess.run([sys.executable, "-c", code], check=True)
