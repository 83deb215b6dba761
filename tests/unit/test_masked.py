"""Addresses as they are shown: a secret in any part of one is hidden, and what is no secret stays."""

from __future__ import annotations

import pytest

from headrace.errors import masked, masked_text

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
