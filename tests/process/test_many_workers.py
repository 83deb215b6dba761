"""Many workers, large environments and few file descriptors: nothing waits for the fork server without end."""

import asyncio
import os
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from drop_in.acting import Made
from process.waiting import children_of, output_of, run_script, wait_until

import headrace as hr
from headrace.workers.forkserver.client import ForkServer, WorkerSpawner

WORKERS = 64


@pytest.fixture(params=["asyncio", "uvloop"])
def run_on_loop(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    factory = None if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    def run(main: Callable[[], Awaitable[Any]]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main())  # type: ignore[arg-type]

    return run


@pytest.fixture
def large_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        monkeypatch.setenv(f"HEADRACE_TEST_{number}", "x" * 2**16)


def length(name: str) -> Made:
    """How long a variable is in the worker that is asked, or "none"."""
    return Made(lambda _: str(len(os.environ[name])) if name in os.environ else "none", 2 * WORKERS)


@pytest.mark.slow
def test_loop_goes_on_while_the_fork_server_reads_nothing(
    fork_server: ForkServer, run_on_loop: Callable[..., Any], large_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> int:
        starter = WorkerSpawner(fork_server, lambda *_: None, {})
        try:
            os.kill(fork_server.process.pid, signal.SIGSTOP)
            starting = []
            for number in range(WORKERS):
                monkeypatch.setenv("HEADRACE_TEST_NUMBER", str(number))  # so that each has surroundings of its own
                starting.append(asyncio.ensure_future(starter.start(number)))
                await asyncio.sleep(0)  # all of it was given to the fork server as far as that can be
            assert not any(task.done() for task in starting)
            os.kill(fork_server.process.pid, signal.SIGCONT)
            started = await asyncio.gather(*starting)
            for _, sock in started:
                sock.close()
            return len({pid for pid, _ in started})
        finally:
            os.kill(fork_server.process.pid, signal.SIGCONT)
            starter.close()

    assert run_on_loop(start) == WORKERS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("regime", ["torch", "economic", "ours"])
def test_many_workers_have_a_large_environment(regime: str, fork_server: ForkServer, large_environment: None) -> None:
    data: Any = length("HEADRACE_TEST_3")
    options: dict[str, Any] = {"economic": True} if regime == "economic" else {}
    if regime == "ours":
        data = hr.from_map(data)
    size = 2 if regime == "torch" else WORKERS
    with hr.DataLoader(data, batch_size=size, num_workers=WORKERS, prefetch_factor=1, **options) as loader:
        assert [value for batch in loader for value in batch] == [str(2**16)] * 2 * WORKERS
    wait_until(lambda: not children_of(fork_server.process.pid), "so many workers have ended")


@pytest.mark.filterwarnings("ignore:DataLoader worker 0:RuntimeWarning")
def test_worker_sees_the_environment_as_it_is_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = hr.DataLoader(length("HEADRACE_TEST_SEEN"), batch_size=1, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    seen = [next(iterator)[0]]
    monkeypatch.setenv("HEADRACE_TEST_SEEN", "four")
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    seen += [batch[0] for batch in iterator]
    assert seen[0] == "none"
    assert seen[-1] == "4"


def state_of(fork_server: ForkServer) -> str:
    return Path(f"/proc/{fork_server.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("sent", [1, 2, 3, 4, 5, 7, 8, 11])
def test_unfinished_message_holds_up_no_other_connection(fork_server: ForkServer, sent: int, is_open: bool) -> None:
    with fork_server.connect() as connection:
        connection.sendall(struct.pack("<Q", 200)[:sent] + b"{}"[: max(0, sent - 8)])
        if not is_open:
            connection.close()
        assert list(hr.DataLoader(hr.from_map(["a", "b"]), num_workers=1)) == [["a"], ["b"]]
        wait_until(lambda: state_of(fork_server) == "S", "the fork server waits")


def test_fork_server_serves_others_while_nobody_reads_what_it_tells(fork_server: ForkServer) -> None:
    """A trainer's loop may be busy for long. Messages to it wait in the fork server."""
    with fork_server.connect() as connection:
        busy = struct.pack("<Q", len(b'{"busy": true}')) + b'{"busy": true}'
        connection.settimeout(20)
        for _ in range(2000):
            connection.sendall(busy)
        assert list(hr.DataLoader(["a", "b"], num_workers=1)) == [["a"], ["b"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_fork_server_that_restarts_keeps_its_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_environment: None
) -> None:
    """Orders to fork follow the order to import a module, and all are repeated."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_with_a_thread.py").write_text(
        "import threading\n"
        "is_over = threading.Event()\n"
        "thread = threading.Thread(target=is_over.wait, daemon=True)\n"
        "thread.start()\n"
        "class Data(list): pass\n"
    )
    import module_with_a_thread

    try:
        loader = hr.DataLoader(module_with_a_thread.Data(range(32)), batch_size=1, num_workers=16)
        assert [batch.item() for batch in loader] == list(range(32))
    finally:
        module_with_a_thread.is_over.set()
        module_with_a_thread.thread.join()
        del sys.modules["module_with_a_thread"]


LIMITED = """
    import resource, warnings
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
    COUNT = 96

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return COUNT
        def __getitem__(self, index):
            return torch.full((2000,), index)

    def numbers(loader):
        return [int(sample[0]) for batch in loader for sample in batch]
"""
SERVED = """
    import functools, http.server
    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *args):
            pass
    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *args):
            pass  # clients close the connections of second requests that lost
    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory={folder!r}))
    port, ready = server.server_address[1], os.fork()
    if ready == 0:
        server.serve_forever()
        os._exit(0)
    server.server_close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [128, 256])
@pytest.mark.parametrize("options", ["", ", economic=True"])
def test_torchs_way_with_16_workers_delivers_all_when_few_files_may_be_open(limit: int, options: str) -> None:
    code = (
        LIMITED.format(limit=limit)
        + f"""
    loader = hr.DataLoader(Numbers(), batch_size=4, num_workers=16, prefetch_factor=4{options})
    print(numbers(loader) == list(range(96)))
    """
    )
    assert output_of(code, timeout_s=90) == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "workers"), [(64, 2), (128, 8), (256, 8)])
def test_stream_over_http_delivers_all_when_few_files_may_be_open(limit: int, workers: int, tmp_path: Path) -> None:
    for number in range(96):
        (tmp_path / f"{number:03d}.bin").write_bytes(bytes([number]) * 100)
    code = (
        SERVED.format(folder=str(tmp_path))
        + LIMITED.format(limit=limit)
        + f"""
    urls = [f"http://127.0.0.1:{{port}}/{{number:03d}}.bin" for number in range(96)]
    try:
        with hr.DataLoader(hr.files(urls).map(lambda s: s["bin"][0]), batch_size=4, num_workers={workers}) as loader:
            print(loader.options["fetch"].concurrency <= {limit} // 2)
            print([int(x) for batch in loader for x in batch] == list(range(96)))
    finally:
        os.kill(ready, signal.SIGKILL)
    """
    )
    assert output_of(code, timeout_s=90) == "True\nTrue\n"


@pytest.mark.slow
@pytest.mark.parametrize("data", ["Numbers()", "hr.from_map(Numbers())"])
def test_loader_says_what_it_needs_when_there_are_too_few_files_for_its_workers(data: str) -> None:
    out = output_of(
        LIMITED.format(limit=64)
        + f"""
    try:
        list(hr.DataLoader({data}, batch_size=4, num_workers=64))
    except hr.OptionError as error:
        print(error)
    """
    )
    assert "num_workers=64 needs some 2" in out
    assert "of the 64 that it may have: raise the limit (`ulimit -n" in out


@pytest.mark.slow
def test_warning_says_that_fewer_reads_are_made_when_more_were_asked_for() -> None:
    code, out, err = run_script(
        LIMITED.format(limit=128)
        + """
    loader = hr.DataLoader(hr.from_map(Numbers()), batch_size=4, num_workers=2, fetch=hr.Fetch(concurrency=500))
    print(loader.options["fetch"].concurrency)
    loader.close()
    """
    )
    assert code == 0, err
    assert 4 <= int(out) < 64
    assert "RuntimeWarning: hr.Fetch(concurrency=500): no more than" in err
    assert "ulimit -n" in err
