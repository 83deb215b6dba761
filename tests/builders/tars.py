"""Small shards made in the test, and what their samples are."""

import asyncio
import io
import tarfile
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats.index import Entry, ShardIndex, pack_directory
from headrace.formats.tar.scanner import TarScanner

Fields = dict[str, bytes]


def tar(samples: Sequence[tuple[str, Fields]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for key, fields in samples:
            for field, body in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def numbered_samples(first: int, count: int, size: int = 700) -> list[tuple[str, Fields]]:
    return [
        (f"{n:06d}", {"bin": bytes([n % 251]) * (size + 37 * (n % 11)), "cls": str(n).encode()})
        for n in range(first, first + count)
    ]


def put_shards(name: str, counts: Sequence[int], size: int = 700) -> list[str]:
    """Shards of so many samples each in memory; their addresses."""
    urls, first = [], 0
    for k, count in enumerate(counts):
        urls.append(f"memory://{name}/{k}.tar")
        memory.put(urls[-1], tar(numbered_samples(first, count, size)))
        first += count
    return urls


def index_of_archive(url: str, archive: bytes, *, crc: bool = True, etag: str | None = None) -> ShardIndex:
    scanner = TarScanner(url)
    rows = scanner.feed(memoryview(archive), 0, True)
    assert scanner.error is None, scanner.error
    bodies = (archive[at : at + size] for at, size in zip(rows.offset.tolist(), rows.size.tolist(), strict=True))
    checksums = np.array([google_crc32c.value(body) for body in bodies], np.uint32)
    return ShardIndex(rows, checksums if crc else None, len(archive), etag)


def index_file(indexes: Sequence[tuple[str, ShardIndex]]) -> bytes:
    blocks = [index.pack() for _, index in indexes]
    entries = [Entry.of(url, index, block) for (url, index), block in zip(indexes, blocks, strict=True)]
    return pack_directory(entries) + b"".join(blocks)


def index_of(urls: Sequence[str], *, crc: bool = True, etag: str | None = None) -> bytes:
    return index_file([(u, index_of_archive(u, asyncio.run(hr.read(u)), crc=crc, etag=etag)) for u in urls])


def put_index(urls: list[str], name: str = "", **options: Any) -> str:
    url = f"memory://indexes/{name or uuid.uuid4().hex}.hri"
    memory.put(url, index_of(urls, **options))
    return url


def put_indexed(name: str, counts: Sequence[int]) -> hr.Stream:
    """A stream of shards of so many samples each, with an index."""
    urls = put_shards(name, counts)
    return hr.stream(urls, index=put_index(urls, name))


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def wanted_sample(url: str, key: str, fields: Fields) -> dict[str, Any]:
    return {"__key__": key, "__url__": url, **fields}


def numbers_of(samples: Sequence[Any]) -> list[int]:
    """The numbers of numbered samples, or numbers as they are."""
    return [sample if isinstance(sample, int) else int(sample["__key__"]) for sample in samples]


def zipped(files: Mapping[str, bytes | str], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "a", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()
