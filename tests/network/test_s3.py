"""S3, over a server on loopback that speaks its protocol."""

from collections.abc import Iterator
from typing import Any

import pytest
from moto_s3 import client_of
from network.bodies import OBSTORE_KEEPS, numbered

from headrace.errors import AccessDeniedError, ObjectMissingError, OptionError, StorageError
from headrace.fetch import Reader
from headrace.options import Fetch
from headrace.testing import FaultServer

BODY = numbered(700_000)
CREDENTIALS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}

pytestmark = [pytest.mark.asyncio, OBSTORE_KEEPS]


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with client_of("shelf") as client:
        yield client


def reader_at(server: FaultServer, options: Fetch | None = None, **settings: Any) -> Reader:
    given = settings or {"access_key_id": "a", "secret_access_key": "b"}
    return Reader(options, concurrency=1, storage_options={**given, "region": "us-east-1", "endpoint": server.url})


async def test_missing_key_and_bucket_are_errors_that_say_which(s3: Any) -> None:
    async with Reader(concurrency=4, storage_options={**CREDENTIALS, "endpoint": s3.meta.endpoint_url}) as reader:
        with pytest.raises(ObjectMissingError, match=r"NoSuchKey.*s3://shelf/none\.tar"):
            await reader.read("s3://shelf/none.tar")
        with pytest.raises(ObjectMissingError, match="NoSuchBucket"):
            await reader.read("s3://no-shelf/none.tar", 0, 10)


async def test_presigned_address_is_read_in_ranges(s3: Any) -> None:
    s3.put_object(Bucket="shelf", Key="signed/a b.tar", Body=BODY)
    url = s3.generate_presigned_url("get_object", {"Bucket": "shelf", "Key": "signed/a b.tar"})
    async with Reader(concurrency=2) as reader:
        assert await reader.read(url) == BODY
        assert await reader.read(url, 100, 200) == BODY[100:200]


def provided() -> Iterator[dict[str, Any]]:
    for n in range(100):
        yield {"access_key_id": f"K{n}", "secret_access_key": "s", "token": None, "expires_at": None}


async def test_address_of_an_object_is_signed_once_for_all_its_ranges() -> None:
    credentials = provided()
    with FaultServer() as server:
        server.add("shelf/a", BODY)
        async with reader_at(server, credential_provider=lambda: next(credentials)) as reader:
            for n in range(3):
                assert await reader.read("s3://shelf/a", n, n + 10) == BODY[n : n + 10]
        assert len({request.query["X-Amz-Signature"] for request in server.log}) == 1
        assert not any("authorization" in request.headers for request in server.log)


@pytest.mark.parametrize("fault", ["expired", "s403", "s401"])
async def test_credentials_that_are_refused_are_read_anew_once(fault: str) -> None:
    credentials = provided()
    with FaultServer() as server:
        server.add("shelf/once", BODY, f"{fault}:times=1")
        server.add("shelf/ever", BODY, fault)
        async with reader_at(server, credential_provider=lambda: next(credentials)) as reader:
            assert await reader.read("s3://shelf/once") == BODY
            with pytest.raises(AccessDeniedError, match=r"s3://shelf/ever"):
                await reader.read("s3://shelf/ever")
        keys = [request.query["X-Amz-Credential"].partition("/")[0] for request in server.log]
        assert keys == ["K0", "K1", "K1"]


async def test_credentials_of_the_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer() as server:
        server.add("shelf/a", BODY)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        async with Reader(concurrency=1) as reader:
            assert await reader.read("s3://shelf/a", 0, 10) == BODY[:10]
        assert server.log[0].query["X-Amz-Credential"].startswith("ENVIRONMENT/")


async def test_missing_credentials_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer() as server:
        settings = {"metadata_endpoint": server.url, "region": "us-east-1"}
        async with Reader(Fetch(attempts=1), concurrency=1, storage_options=settings) as reader:
            with pytest.raises(StorageError, match="credentials"):
                await reader.read("s3://shelf/a")


@pytest.mark.parametrize("key", ["a//b", "a/", "/a", "a/../b", "."])
async def test_key_that_obstore_would_change_is_refused(key: str) -> None:
    async with Reader(concurrency=1, storage_options=CREDENTIALS) as reader:
        with pytest.raises(OptionError, match="empty part or one of dots"):
            await reader.read(f"s3://shelf/{key}")
