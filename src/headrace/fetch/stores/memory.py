"""Objects in this process's memory, for tests and examples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import blake2b

from headrace.errors import ObjectChangedError, ObjectMissingError, OptionError, masked
from headrace.types import Answer, Buffer, Listed

_PAGE = 1000

_objects: dict[str, tuple[bytes, str]] = {}


def put(url: str, data: bytes) -> None:
    """Store or replace `data` under `url` (`memory://…`) for all readers of this process."""
    _objects[_path(url)] = (bytes(data), f'"{blake2b(data, digest_size=8).hexdigest()}"')


def remove(url: str) -> None:
    _objects.pop(_path(url), None)


def _path(url: str) -> str:
    if not url.startswith("memory://"):
        raise OptionError(f"{masked(url)!r} must begin with memory://")
    return url.removeprefix("memory://")


class MemoryStore:
    is_local = gives_ends = True

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        url = f"memory://{path}"
        if path not in _objects:
            raise ObjectMissingError("nothing was put there in this process", url=url)
        data, etag = _objects[path]
        if if_match is not None and if_match != etag:
            raise ObjectChangedError(f"the object changed: its ETag was {if_match}, now {etag}", url=url)
        first = max(0, len(data) + start) if start is not None and start < 0 else min(start or 0, len(data))
        last = len(data) if stop is None else max(first, min(stop, len(data)))
        return Answer(first, last, len(data), etag, _one(memoryview(data)[first:last]))

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:  # noqa: ARG002
        found = [Listed(path, len(data), etag) for path, (data, etag) in _objects.items() if path.startswith(prefix)]
        for start in range(0, len(found), _PAGE):
            yield found[start : start + _PAGE]

    async def aclose(self) -> None:
        """Do nothing: the objects stay."""


async def _one(piece: Buffer) -> AsyncIterator[Buffer]:
    if len(piece):
        yield piece
