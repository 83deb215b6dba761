"""Serve a folder with faults: `python -m headrace.testing.fault_server FOLDER --fault …`."""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

from headrace.errors import OptionError
from headrace.testing.fault_server.faults import FAULTS
from headrace.testing.fault_server.server import FaultServer, When
from headrace.types import Buffer


class Folder(Mapping[str, Buffer]):
    """The files below a folder, by relative path, memory-mapped."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._mapped: dict[str, tuple[int, int, Buffer]] = {}

    def __getitem__(self, name: str) -> Buffer:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root) or not path.is_file():
            raise KeyError(name)
        about = path.stat()
        size, changed_ns, data = self._mapped.get(name, (0, 0, b""))
        if (size, changed_ns) != (about.st_size, about.st_mtime_ns):
            with path.open("rb") as file:
                data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)) if about.st_size else b""
            self._mapped[name] = about.st_size, about.st_mtime_ns, data
        return data

    def __iter__(self) -> Iterator[str]:
        return (str(path.relative_to(self._root)) for path in self._root.rglob("*") if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _table() -> str:
    lines = [f"  {name:14} {(fault.__doc__ or '').strip()}" for name, fault in FAULTS.items()]
    return "\n".join(["faults:", *lines, "", inspect.cleandoc(When.__doc__ or "")])


def main(arguments: list[str]) -> int:
    """Serve until interrupted. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.testing.fault_server",
        description=__doc__,
        epilog=_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="its files are the objects, its folders the buckets")
    parser.add_argument("--port", type=int, default=0, help="0 (the default): any that is free")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another run")
    parser.add_argument(
        "--fault", action="append", default=[], help="name:key=value,… with a fault's and a rule's keys"
    )
    given = parser.parse_args(arguments)
    try:
        server = FaultServer(Folder(given.folder), faults=given.fault, seed=given.seed, port=given.port)
    except OptionError as error:
        parser.error(str(error))
    with server:
        sys.stdout.write(f"{server.url} and, where no secret belongs, {server.elsewhere_url}\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
