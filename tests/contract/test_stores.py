"""Every store of ours keeps the contract of stores."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.http import HTTPFileSystem
from fsspec.spec import AbstractFileSystem
from moto_s3 import client_of

import headrace as hr
from headrace._util.reads import Version
from headrace.errors import ObjectChangedError, StorageError
from headrace.fetch.stores import memory
from headrace.fetch.stores.addresses import Stores, gives_ends
from headrace.options import Fetch
from headrace.testing import FaultServer
from headrace.testing.stores import StoreContract
from headrace.types import Listed, Lists, Store

pytestmark = pytest.mark.may_leave(
    descriptors=r" tcp \S+ -> 127\.0\.0\.1:\d+$",
    reason="about once in 500 times obstore keeps its last connection after its store is gone",
)


class _Prefixed:
    """A store asked for paths as the reader would ask for them under `base`."""

    def __init__(self, base: str, *, quoted: bool = False, allow_pipe: bool = False, **storage_options: Any) -> None:
        self._stores = Stores(Fetch(allow_pipe=allow_pipe), storage_options)
        self._base, self._quoted = base, quoted

    @property
    def gives_ends(self) -> bool:
        return gives_ends(self._found("x")[0])

    def _found(self, path: str) -> tuple[Store, str]:
        return self._stores.of(f"{self._base}/{quote(path) if self._quoted else path}")

    async def get(self, path: str, *where: Any, **options: Any) -> Any:
        store, path = self._found(path)
        return await store.get(path, *where, **options)

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[Sequence[Listed]]:
        store, path = self._found(prefix)
        before = path[: len(path) - len(prefix)]
        if isinstance(store, Lists):
            async for page in store.listing(path, levels=levels):
                yield [one._replace(path=one.path.removeprefix(before)) for one in page]

    async def aclose(self) -> None:
        await self._stores.aclose()


class _Unlisted(_Prefixed):
    listing = None  # type: ignore[assignment]


class TestMemory(StoreContract):
    def open_store(self) -> Store:
        return _Prefixed("memory://contract")

    def put(self, path: str, data: bytes) -> None:
        memory.put(f"memory://contract/{path}", data)
        self.written.add(path)

    @pytest.fixture(autouse=True)
    def emptied(self) -> Iterator[None]:
        self.written: set[str] = set()
        yield
        for path in self.written:
            memory.remove(f"memory://contract/{path}")


class TestFiles(StoreContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def open_store(self) -> Store:
        return _Prefixed(str(self.place))

    def put(self, path: str, data: bytes) -> None:
        (self.place / path).parent.mkdir(parents=True, exist_ok=True)
        (self.place / path).write_bytes(data)


class TestFileAddresses(TestFiles):
    def open_store(self) -> Store:
        return _Prefixed(f"file://{self.place}", quoted=True)


class TestWeb(StoreContract):
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with FaultServer() as self.web:
            yield

    def open_store(self) -> Store:
        return _Unlisted(self.web.url, quoted=True, **self.settings)

    def put(self, path: str, data: bytes) -> None:
        self.web.add(path, data)


class TestWebByObstore(TestWeb):
    settings = {"client_options": {"http1_only": True}}


class TestHub(TestWeb):
    def open_store(self) -> Store:
        return _Prefixed("hf://datasets/me/set", endpoint=self.web.url, token="secret")

    def put(self, path: str, data: bytes) -> None:
        self.web.add(f"datasets/me/set/resolve/main/{path}", data, "redirect:mode=other")
        entry = {"type": "file", "path": path, "size": len(data), "oid": "x"}
        self.files = {**getattr(self, "files", {}), path: entry}
        for folder in {"", *(path[:at] for at, character in enumerate(path) if character == "/")}:
            page = [one for name, one in self.files.items() if name.startswith(f"{folder}/" if folder else "")]
            place = f"api/datasets/me/set/tree/main{'/' if folder else ''}{quote(folder)}"
            self.web.add(place, json.dumps(page).encode())


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, Any]]:
    with client_of("contract") as client:
        yield client.meta.endpoint_url, client


class TestS3(StoreContract):
    access: ClassVar[str] = "private"
    bucket: ClassVar[str] = ""
    settings: ClassVar[dict[str, Any]] = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}

    @pytest.fixture(autouse=True)
    def server(self, s3: tuple[str, Any]) -> None:
        self.endpoint, self.client = s3[0] + self.bucket, s3[1]

    def open_store(self) -> Store:
        return _Prefixed("s3://contract", **self.settings, endpoint=self.endpoint)

    def put(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket="contract", Key=path, Body=data, ACL=self.access)


class TestS3ForEverybody(TestS3):
    access = "public-read"
    settings = {"skip_signature": True}


class TestS3WithTheBucketInTheEndpoint(TestS3):
    settings = {**TestS3.settings, "virtual_hosted_style_request": True}
    bucket = "/contract"


class TestS3ByObstore(TestS3):
    settings = {**TestS3.settings, "client_options": {"http1_only": True}}


class TestGcs(TestS3ForEverybody):
    """As GCS answers, for which objects of an S3 are read without a signature."""

    def open_store(self) -> Store:
        nobody = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        key = json.dumps({**nobody, "gcs_base_url": self.endpoint})
        return _Prefixed("gs://contract", service_account_key=key, client_options={"allow_http": True})


class TestPipe(TestFiles):
    names = ("plain.bin", "folder/deep/er.bin", "ünïcode.bin")

    def open_store(self) -> Store:
        return _Unlisted(f"pipe:cat {self.place}", allow_pipe=True)

    def test_missing_object_is_an_error_that_names_it(self) -> None:
        with pytest.raises(StorageError, match=r"exit status 1.*no-such\.bin"):
            self._get("no-such.bin")


_shelf: dict[str, bytes] = {}


def _about(path: str) -> dict[str, Any]:
    if path not in _shelf:
        raise FileNotFoundError(path)
    return {"name": path, "size": len(_shelf[path]), "type": "file", "ETag": f'"{hash(_shelf[path])}"'}


def _inside(folder: str) -> list[dict[str, Any]]:
    inside = {path.removeprefix(f"{folder}/").partition("/")[::2] for path in _shelf if path.startswith(f"{folder}/")}
    if not inside:
        raise FileNotFoundError(folder)
    folders = {name for name, rest in inside if rest}
    return [{"name": f"{folder}/{name}", "size": 0, "type": "directory"} for name in sorted(folders)] + [
        _about(f"{folder}/{name}") for name, rest in sorted(inside) if not rest
    ]


class ShelfFileSystem(AbstractFileSystem):
    protocol = "shelf"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return _about(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[dict[str, Any]]:
        return _inside(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return _shelf[path][start:end]


class AsyncShelfFileSystem(AsyncFileSystem):
    protocol = "ashelf"

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return _about(path)

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return _inside(path)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        await asyncio.sleep(0)
        return _shelf[path][start:end]


class TestFsspecInThreads(StoreContract):
    scheme: ClassVar[str] = "shelf"

    @pytest.fixture(autouse=True)
    def registered(self) -> Iterator[None]:
        fsspec.register_implementation("shelf", ShelfFileSystem, clobber=True)
        fsspec.register_implementation("ashelf", AsyncShelfFileSystem, clobber=True)
        yield
        _shelf.clear()

    def open_store(self) -> Store:
        return _Prefixed(f"{self.scheme}://top")

    def put(self, path: str, data: bytes) -> None:
        _shelf[f"top/{path}"] = data

    def test_object_that_is_replaced_between_two_ranges_is_refused(self) -> None:
        async def read_on(store: Store) -> None:
            self.put("same-size.bin", b"a" * 100)
            first = await store.get("same-size.bin", 0, 10)
            assert (await store.get("same-size.bin", 10, 20, if_match=first.etag)).etag == first.etag
            self.put("same-size.bin", b"b" * 100)
            with pytest.raises(ObjectChangedError):
                await store.get("same-size.bin", 20, 30, if_match=first.etag)

        self._with_store(read_on)


class TestFsspecOnTheLoop(TestFsspecInThreads):
    scheme: ClassVar[str] = "ashelf"


class RemoteDisk(ShelfFileSystem):
    """Lists less about an object than `info` gives. Links are listed as themselves, as by SFTP."""

    protocol = "rdisk"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        about = {**_about(path), "mtime": 7.5, "created": 1}
        return about if "tagged" in path else {**about, "ETag": None}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[dict[str, Any]]:
        entries = [self.info(one["name"]) | {"mtime": None} for one in _inside(path)]
        return [one | {"type": "link", "size": 3, "mtime": 2} if "link" in one["name"] else one for one in entries]


def test_fsspec_listing_has_only_the_versions_that_info_gives() -> None:
    fsspec.register_implementation("rdisk", RemoteDisk, clobber=True)
    bodies = {f"top/{name}.bin": name.encode() * 9 for name in ("link", "plain", "tagged")}
    _shelf.update(bodies)
    try:
        data = hr.files("rdisk://top/*.bin")
        assert [sample["bin"] for sample in data] == list(bodies.values())
        versions = [data.source.urls.version(k) for k in range(3)]
        etag = _about("top/tagged.bin")["ETag"]
        assert versions == [None, Version(45, None, "listed"), Version(54, etag, "listed")]
        _shelf["top/tagged.bin"] = b"changed" * 9
        with pytest.raises(ObjectChangedError, match="tagged"):
            data[2]
    finally:
        _shelf.clear()


class TestFsspecFiles(TestFiles):
    def open_store(self) -> Store:
        return _Prefixed(f"local://{self.place}")


class WebFileSystem(HTTPFileSystem):
    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.replace("fweb://", "http://")


class TestFsspecWeb(TestWeb):
    @pytest.fixture(autouse=True)
    def registered(self) -> None:
        fsspec.register_implementation("fweb", WebFileSystem, clobber=True)

    def open_store(self) -> Store:
        return _Unlisted(self.web.url.replace("http://", "fweb://"), quoted=True)
