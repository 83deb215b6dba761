"""The command `headrace`, run as people run it: its output, its exit status, and builds that resume after a kill."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders.tars import tar
from process.waiting import DEADLINE_S, output_of

from headrace.formats.index import read_directory
from headrace.indexes.cache_path import cache_path
from headrace.testing import FaultServer

SUMMARY = re.compile(
    r"(?P<shards>[\d,]+) shards(?: \((?P<kept>[\d,]+) from before\))?, (?P<samples>[\d,]+) samples, "
    r"(?P<members>[\d,]+) members: (?P<size>[\d,]+) bytes of index (?P<where>.*); "
    r"(?P<requests>[\d,]+) requests, (?P<nbytes>[\d,]+) bytes read"
    r"(?: \((?P<share>[\d.]+) % of the shards\))?, [\d.]+ s\n"
)


def shard(count: int) -> bytes:
    return tar([(f"{n:04d}", {"bin": bytes([n]) * 3000, "cls": b"%d" % n}) for n in range(count)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *arguments]


def headrace(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(count: int = 5) -> Iterator[tuple[FaultServer, str]]:
    with FaultServer() as server:
        for k in range(count):
            server.add(f"{k}.tar", shard(20 + k))
        yield server, f"{server.url}/{{0..{count - 1}}}.tar"


@pytest.mark.slow
def test_index_goes_to_the_cache_and_one_line_tells_of_it() -> None:
    with serving() as (server, pattern):
        status, out, err = headrace("index", pattern)
        urls = [f"{server.url}/{k}.tar" for k in range(5)]
        place = cache_path(urls)
        assert (status, err) == (0, "")
        match = SUMMARY.fullmatch(out)
        assert match is not None, out
        told = {name: text and text.replace(",", "") for name, text in match.groupdict().items()}
        size = sum(len(data) for data in server.objects.values())
        assert told == {
            "shards": "5",
            "kept": None,
            "samples": "110",
            "members": "220",
            "size": str(place.stat().st_size),
            "where": f"in {place}",
            "requests": str(len(server.log)),
            "nbytes": str(size),
            "share": "100.0",
        }
        assert list(read_directory(place.read_bytes()).names) == urls
        assert [path.name for path in place.parent.iterdir()] == [place.name]


@pytest.mark.slow
def test_index_goes_where_it_is_told_to(folder: Path) -> None:
    for k in range(2):
        (folder / f"{k}.tar").write_bytes(shard(3))
    assert headrace("index", "{0,1}.tar", "--output", "new/all.hri", "--quiet") == (0, "", "")
    assert read_directory((folder / "new/all.hri").read_bytes()).samples.tolist() == [3, 3]
    status, out, _ = headrace("index", "0.tar", "1.tar", "--beside", "--headers")
    assert (status, "beside the shards" in out) == (0, True)
    assert [read_directory((folder / f"{k}.tar.hri").read_bytes()).samples.tolist() for k in range(2)] == [[3], [3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        (["0.tar", "--output", "http://127.0.0.1:1/a.hri"], 1, "headrace index: error: .*cannot be written to"),
        (["https://127.0.0.1:1/0.tar", "--beside"], 1, "headrace index: error: .*cannot be written to"),
        (["nobody://0.tar"], 1, "headrace index: error: .*nobody"),
        (["{1..2..0}.tar"], 1, "headrace index: error: .*a step of 0"),
        (["0.tar", "--output", "0.tar/all.hri"], 1, "headrace index: error: .*exists"),
        ([], 2, "usage: headrace"),
        (["a.tar", "--concurrency", "0"], 2, "usage: headrace"),
        (["a.tar", "--storage-option", "secret"], 2, "usage: headrace"),
        (["a.tar", "--beside", "--output", "b"], 2, "usage: headrace"),
        (["a.tar", "--head"], 2, "usage: headrace"),
    ],
)
def test_error_has_a_status_and_no_traceback(arguments: list[str], expected: int, message: str, folder: Path) -> None:
    (folder / "0.tar").write_bytes(shard(3))
    status, out, err = headrace("index", *arguments)
    assert (status, out) == (expected, "")
    assert re.match(message, err), err
    assert "Traceback" not in err and "'secret'" not in err


@pytest.mark.slow
def test_damaged_shard_is_named_and_the_others_are_done() -> None:
    with serving() as (server, pattern):
        server.add("1.tar", shard(21)[:-20_000])
        server.add("3.tar", b"")
        status, out, err = headrace("index", pattern)
        assert (status, out) == (1, "")
        lines = err.splitlines()
        assert len(lines) == 3
        assert all(any(name in line for line in lines[:2]) for name in ("1.tar", "3.tar"))
        assert "2 of 5 shards failed" in lines[2]
        for k in (1, 3):
            server.add(f"{k}.tar", shard(20 + k))
        status, out, _ = headrace("index", pattern)
        assert (status, out.startswith("5 shards (3 from before), 110 samples")) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_build_that_was_ended_goes_on_and_gives_the_same_file(how: signal.Signals, folder: Path) -> None:
    with serving() as (server, pattern):
        assert headrace("index", pattern, "--output", "once.hri")[0] == 0
        server.add("3.tar", shard(23), "hang")
        with running("index", pattern, "--output", "twice.hri", "--concurrency", "1") as process:
            assert server.wait_until_stalled()
            process.send_signal(how)
            out, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == (-how if how == signal.SIGKILL else 130)
            assert (out, "Traceback" in err) == ("", False)
        assert not (folder / "twice.hri").exists()
        server.add("3.tar", shard(23))
        server.log.clear()
        status, out, _ = headrace("index", pattern, "--output", "twice.hri")
        assert (status, out.startswith("5 shards (3 from before)")) == (0, True)
        assert sorted((request.name, request.range) for request in server.log) == [
            *((f"{k}.tar", "bytes=0-0") for k in range(3)),
            *((f"{k}.tar", "bytes=0-4194303") for k in (3, 4)),
        ]
        assert (folder / "twice.hri").read_bytes() == (folder / "once.hri").read_bytes()
        assert sorted(path.name for path in folder.iterdir()) == ["once.hri", "twice.hri"]


@pytest.mark.slow
def test_second_process_says_that_another_builds_the_same_index() -> None:
    with serving() as (server, pattern):
        server.add("0.tar", shard(20), "hang")
        with running("index", pattern) as process:
            assert server.wait_until_stalled()
            status, _, err = headrace("index", pattern)
            assert status == 1
            assert "another process builds this index" in err
            process.send_signal(signal.SIGKILL)


def test_progress_is_one_line_of_a_terminal_and_gone_at_the_end(folder: Path) -> None:
    (folder / "0.tar").write_bytes(shard(3))
    here, there = pty.openpty()
    try:
        subprocess.run(command("index", "0.tar"), stdout=subprocess.PIPE, stderr=there, timeout=DEADLINE_S, check=True)
        shown = os.read(here, 65_536).decode()
    finally:
        os.close(here)
        os.close(there)
    assert re.match(r"\rheadrace index: \d of \d shards, [\d.]+ MB read\x1b\[K", shown)
    assert shown.endswith("\r\x1b[K")
    assert "\n" not in shown


@pytest.mark.slow
def test_help_and_version_are_shown_and_a_command_is_needed() -> None:
    assert headrace()[0] == 2
    for arguments, text in (("--help", "index"), ("--version", "headrace "), ("index --help", "--headers")):
        assert text in headrace(*arguments.split())[1]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "allowed"), [("--help", set()), ("index 0.tar", {"numpy"})])
def test_command_imports_no_more_than_it_needs(arguments: str, allowed: set[str], folder: Path) -> None:
    (folder / "0.tar").write_bytes(shard(3))
    code = f"""
        import sys
        from headrace.cli import main
        try:
            main({arguments.split()!r})
        except SystemExit:
            pass
        print(*({{"torch", "numpy", "obstore", "fsspec"}} & set(sys.modules)))
    """
    assert set(output_of(code, preamble="").splitlines()[-1].split()) <= allowed
