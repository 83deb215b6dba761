"""Objects in memory at new addresses, the fields of their samples, and the bytes that requests asked for."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.fetch.stores import memory
from headrace.testing import FaultServer

_numbers = itertools.count()


def put(data: bytes, name: str) -> str:
    """Store an object. Return its address."""
    return f"{put_folder({name: data})}/{name}"


def put_folder(files: Mapping[str, bytes]) -> str:
    """Store files by their names. Return the address of their folder."""
    folder = f"memory://stored/{next(_numbers)}"
    for name, data in files.items():
        memory.put(f"{folder}/{name}", data)
    return folder


def fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample without reserved fields such as `__key__`."""
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def rows(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [fields(sample) for sample in samples]


def ranges(server: FaultServer) -> list[tuple[int, int]]:
    """The (start, stop) that requests asked for. Requests for the end of an object do not count."""
    asked = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.log]
    return [(int(start), int(stop) + 1) for start, stop in asked if start]
