"""Objects in this process's memory, for tests and examples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import blake2b

from headrace._util.reads import check_match, clamped
from headrace.errors import ObjectMissingError, OptionError
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
        raise OptionError.at(url, "must begin with memory://")
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
        check_match(if_match, etag, url)
        first, last = clamped(start or 0, stop, len(data))
        return Answer(first, last, len(data), etag, one_piece(memoryview(data)[first:last]))

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        found = [Listed(path, len(data), etag) for path, (data, etag) in _objects.items() if path.startswith(prefix)]
        for start in range(0, len(found), _PAGE):
            yield found[start : start + _PAGE]

    async def aclose(self) -> None:
        """Do nothing: the objects stay."""


async def one_piece(piece: Buffer) -> AsyncIterator[Buffer]:
    if len(piece):
        yield piece
