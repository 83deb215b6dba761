"""The leak check of every test.

After each test there may be no thread, process, file descriptor, shared mapping, /dev/shm entry, temporary file or
unfinished asyncio task that was not there before it. Things that end by themselves are waited for, some seconds long.

Exceptions are declared:

* by a fixture that lives longer than one test, for what it serves with (`leaves` is a session fixture):
      leaves.allow(threads="process_request_thread", descriptors=f"tcp 127.0.0.1:{port} ", reason="the S3 server")
* by a test: `@pytest.mark.may_leave(processes="sleep", reason="...")`.

The values are regular expressions, searched for in the description that the failure prints. A test that failed is not
checked: its traceback keeps things alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import multiprocessing
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ours
import pytest
from hypothesis import HealthCheck, settings

# The same examples in each run, but where others are asked for. A busy machine has no deadline.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", settings.get_profile("same"), derandomize=False)
settings.load_profile("explore" if os.environ.get("HEADRACE_EXPLORE") and not os.environ.get("CI") else "same")

KINDS = ("threads", "processes", "users", "descriptors", "mappings", "shm", "files", "tasks")
DEADLINE_S = 5.0
FULL = Path(__file__).parent / "full"
MANY_OBJECTS = 40_000  # a collection looks at all of them, after each test
_failed = pytest.StashKey[bool]()


class Leaves:
    """Allowed leaks: (kind, pattern) pairs, each with its reason."""

    def __init__(self, allowed: dict[tuple[str, str], str] | None = None) -> None:
        self.allowed = dict(allowed or {})

    def allow(self, *, reason: str, **patterns: str) -> None:
        for kind, pattern in patterns.items():
            assert kind in KINDS, f"{kind!r} is none of {KINDS}"
            self.allowed[kind, pattern] = reason

    def covers(self, kind: str, description: str) -> bool:
        return any(kind == k and re.search(pattern, description) for k, pattern in self.allowed)


@pytest.fixture(scope="session")
def leaves() -> Leaves:
    return Leaves()


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_loaded(tmp_path_factory: pytest.TempPathFactory, leaves: Leaves) -> Iterator[None]:
    """Start what libraries keep for the life of a process before the first test looks at what is there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: processes would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[ours.MARK] = uuid.uuid4().hex  # workers carry it, also without a parent
    private = tmp_path_factory.mktemp("temporary")  # so that other programs' temporary files are not taken for ours
    before = {name: os.environ.get(name) for name in ("TMPDIR",)}
    os.environ["TMPDIR"] = tempfile.tempdir = str(private)
    leaves.allow(files="^torchinductor_", reason="torch's optimizers make its compiler's cache folder on first use")

    import torch

    torch.ones(8) @ torch.ones(8)
    if torch.distributed.is_available():  # its stores keep a pipe for signals
        torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()  # libuv keeps a pipe for signals

    async def start_the_runtime_of_obstore() -> None:
        import obstore
        from obstore.store import MemoryStore

        await obstore.put_async(MemoryStore(), "a", b"a")

    asyncio.run(start_the_runtime_of_obstore())
    gc.collect()
    gc.freeze()  # libraries are garbage of no test; the collections after each one stay short
    yield
    tempfile.tempdir = None
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def accelerator(leaves: Leaves) -> None:
    """Start what the driver of a GPU keeps for the life of a process."""
    import torch

    if torch.cuda.is_available():
        leaves.allow(descriptors="nvidia|/dev/kfd|/dev/dri|eventpoll|pipe:", reason="the driver's, for ever")
        leaves.allow(files="^cuda|^nv", reason="the driver's caches")
        memory = torch.ones(2**20).pin_memory()
        torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
        memory.to("cuda", non_blocking=True).add_(1).sum().item()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()


@pytest.fixture
def no_fork() -> Iterator[None]:
    """Python starts processes as it does by default from 3.14 on."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(scope="module", autouse=True)
def _what_tests_have_imported_is_no_garbage() -> Iterator[None]:
    """Some of torch is imported on first use, and is so large that a collection after it takes a fifth of a second."""
    frozen = gc.get_freeze_count()
    yield
    if gc.get_freeze_count() > frozen:  # by a test: what its module alone held is garbage by now
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FULL in item.path.parents:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    report = yield
    if call.excinfo is not None and call.when in ("setup", "call"):
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def _nothing_stays_behind(
    request: pytest.FixtureRequest, leaves: Leaves, _kept_fork_server: _KeptForkServer
) -> Iterator[None]:
    may_leave = Leaves(leaves.allowed)
    before = {kind: set(look()) for kind, look in LOOKS.items()}
    yield
    if request.node.stash.get(_failed, False):
        _kept_fork_server.let_go()
        return
    may_leave.allowed.update(leaves.allowed)
    for marker in request.node.iter_markers("may_leave"):
        may_leave.allow(**marker.kwargs)
    left = _what_is_left(before, may_leave, _kept_fork_server)
    if left:
        pytest.fail("leaked:\n  " + "\n  ".join(left), pytrace=False)
    if (
        len(gc.get_objects(generation=2)) > MANY_OBJECTS
    ):  # imported, or a fixture's: they are no garbage of the next test
        gc.freeze()


class _KeptForkServer:
    """The process that workers are forked from: it waits for a next loader, and is kept for that of a next test.

    To start it takes two seconds of CPU time, as it imports torch. A test that is of its life has one of its own.
    """

    def __init__(self) -> None:
        self._kept: Any = None

    def take(self, before: dict[str, set[object]]) -> None:
        """Keep a running fork server that a test has started and released.

        It is no leak then, but its users are.
        """
        shared = _fork_server()
        if self._kept is not None and (shared is not self._kept or shared.process.poll() is not None):
            self.let_go()
        if shared is None or shared.users or shared.owner != os.getpid():
            return
        if shared.process.poll() is not None:
            shared.shut_down(only_if_idle=True)
        else:
            self._kept = kept = shared.acquire()
            before["users"].update(_users())
            own = {str(kept._control.fileno()), str(kept._life)}
            before.setdefault("processes", set()).update(p for p in ours.processes() if p[0] == kept.process.pid)
            before.setdefault("descriptors", set()).update(d for d in _descriptors() if d[0] in own)

    def let_go(self) -> None:
        if self._kept is not None:
            kept, self._kept = self._kept, None
            kept.give_up()
            kept.release()


def _fork_server() -> Any:
    starter = sys.modules.get("headrace.workers.forkserver.client")
    return None if starter is None else starter.ForkServer._shared


@pytest.fixture(scope="session")
def _kept_fork_server() -> Iterator[_KeptForkServer]:
    kept = _KeptForkServer()
    yield kept
    kept.let_go()


@pytest.fixture
def own_fork_server() -> Iterator[None]:
    """The test has a fork server of its own, and may leave it in any state."""
    from headrace.workers.forkserver.client import ForkServer

    shared, ForkServer._shared = ForkServer._shared, None
    yield
    ForkServer.shut_down()
    ForkServer._shared = shared


def _what_is_left(before: dict[str, set[object]], may_leave: Leaves, fork_server: _KeptForkServer) -> list[str]:
    """Descriptions of what is still there when everything that ends by itself has had its time."""
    waited_s = 0.0  # no more than was asked for: on a busy machine other processes get the time that passes
    pause_s = 0.005
    while True:
        gc.collect()
        fork_server.take(before)
        new = [
            (kind, thing, description)
            for kind, look in LOOKS.items()
            for thing, description in look().items()
            if thing not in before[kind]
        ]
        shared = ours.shared_names([str(thing) for kind, thing, _ in new if kind == "shm"])
        addresses = _addresses() if any("-> socket:" in description for _, _, description in new) else {}
        left = [
            (kind, thing, told)
            for kind, thing, description in new
            for told in [f"{description} {addresses.get(description.rpartition(' ')[2], '')}".rstrip()]
            if not may_leave.covers(kind, told) and (kind != "shm" or thing in shared)
        ]
        remaining_s = DEADLINE_S - waited_s
        if not left or remaining_s <= 0:
            return [f"{kind}: {description}" for kind, _, description in left]
        thread = next((thing for _, thing, _ in left if isinstance(thing, threading.Thread)), None)
        pause_s = 0.5 if thread is not None else min(2 * pause_s, 0.1)
        began_s = time.monotonic()
        if thread is not None:
            thread.join(pause_s)
        else:
            time.sleep(pause_s)
        waited_s += min(pause_s, time.monotonic() - began_s)


def _threads() -> dict[object, str]:
    return {t: f"{t.name}{' (daemon)' if t.daemon else ''}" for t in threading.enumerate()}


def _users() -> dict[object, str]:
    shared = _fork_server()
    count = 0 if shared is None else shared.users
    return {(shared.process.pid, number): f"the fork server's user number {number}" for number in range(count)}


def _tasks() -> dict[object, str]:
    return {id(o): repr(o) for o in gc.get_objects() if issubclass(type(o), asyncio.Task) and not o.done()}


def _files() -> dict[object, str]:
    folder = Path(tempfile.gettempdir())
    return {name: name for name in ours.names_in(str(folder)) if not ours.is_probe(folder / name)}


def _shm() -> dict[object, str]:
    return {name: f"/dev/shm/{name}" for name in ours.names_in("/dev/shm")}


def _mappings() -> dict[object, str]:
    """Shared memory that is still mapped though its descriptor may be closed."""
    found: dict[object, str] = {}
    maps = ours.data("/proc/self/maps")
    if b"/memfd:" not in maps and b"/dev/shm/" not in maps:
        return found  # most of the time; there are some thousand lines
    for line in os.fsdecode(maps).splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/")):
            found[fields[0], fields[4], fields[5]] = f"{fields[5]} inode {fields[4]}"
    return found


def _descriptors() -> dict[object, str]:
    found: dict[object, str] = {}
    for fd in set(ours.names_in("/proc/self/fd")) - {"0", "1", "2"}:  # pytest points those elsewhere while it captures
        with contextlib.suppress(OSError):  # the one that listed the folder is closed by now
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 -- of each, twice a test
            found[fd, target] = f"{fd} -> {target}"
    return found


def _addresses() -> dict[str, str]:
    found = {}
    for family, path in ((socket.AF_INET, "/proc/self/net/tcp"), (socket.AF_INET6, "/proc/self/net/tcp6")):
        for line in ours.text(path).splitlines()[1:]:
            fields = line.split()
            local, remote = (_address(family, field) for field in fields[1:3])
            found[f"socket:[{fields[9]}]"] = f"tcp {local} -> {remote}"
    return found


def _address(family: socket.AddressFamily, field: str) -> str:
    host, port = field.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return f"{socket.inet_ntop(family, struct.pack(f'={len(words)}I', *words))}:{int(port, 16)}"


LOOKS: dict[str, Callable[[], Mapping[Any, str]]] = {
    "threads": _threads,
    "users": _users,
    "tasks": _tasks,
    "files": _files,
}
if sys.platform == "linux":
    LOOKS |= {"processes": ours.processes, "descriptors": _descriptors, "mappings": _mappings, "shm": _shm}


@pytest.fixture(scope="session")
def digits() -> ModuleType:
    """The module that the examples share; they run as scripts, so it is no part of a package."""
    path = Path(__file__).parents[1] / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
