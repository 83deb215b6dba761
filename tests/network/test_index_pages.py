"""Folders of web servers are listed by the index pages of http.server, nginx and Apache."""

import http.server
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders.tars import tar

import headrace as hr
from headrace.errors import AccessDeniedError, OptionError
from headrace.fetch.web.index_pages import page_of
from headrace.testing import FaultServer

APACHE = b"""<!DOCTYPE HTML PUBLIC "-//W3C//DTD HTML 3.2 Final//EN">
<html><head><title>Index of /data</title></head><body><h1>Index of /data</h1>
<table><tr><th><a href="?C=N;O=D">Name</a></th><th><a href="?C=M;O=A">Last modified</a></th></tr>
<tr><td><a href="/">Parent Directory</a></td></tr>
<tr><td><a href="a%20b.tar">a b.tar</a></td><td align="right">2026-01-01 00:00  </td><td> 10K</td></tr>
<tr><td><a href="x&amp;y.tar">x&amp;y.tar</a></td></tr><tr><td><a href="./k:v.tar">k:v.tar</a></td></tr>
<tr><td><a href="/data/z.tar">z.tar</a></td></tr><tr><td><a href="z.tar">again</a></td></tr>
<tr><td><a href="deep/">deep/</a></td></tr><tr><td><a href="https://elsewhere.org/data/e.tar">e</a></td></tr>
<tr><td><a href="deep/inner.tar">i</a></td></tr><tr><td><a href="mailto:a@b">m</a></td></tr></table></body></html>"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    for name in ("data/1 a.tar", "data/0.tar", "data/deep/&2.tar", "data/deep/é3.tar"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(tar([(name.rpartition("/")[2][:2].strip().rstrip("."), {"txt": b"x"})]))
    (root / "data/README.md").write_bytes(b"#")
    return root


NGINX = shutil.which("nginx") or "/usr/sbin/nginx"


@contextmanager
def pythons(folder: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def nginx(folder: Path, listing: str) -> Iterator[str]:
    tmp_path = folder.parent
    if not Path(NGINX).exists():
        pytest.skip("nginx is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    temporary = " ".join(f"{kind}_temp_path {tmp_path}/t;" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;\n"
        f"events {{}} http {{ access_log off; client_body_temp_path {tmp_path}/t; {temporary}\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder};\n"
        f"location /data/ {{ autoindex on; autoindex_format {listing}; }} }} }}\n"
    )
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == tmp_path.stat().st_uid and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    process = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)], stderr=subprocess.PIPE)
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.01)
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(params=["python", "nginx, html", "nginx, json"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    name, _, listing = request.param.partition(", ")
    with pythons(folder) if name == "python" else nginx(folder, listing) as url:
        yield url


def test_folder_of_a_server_is_read_by_its_pages(server: str, request: pytest.FixtureRequest) -> None:
    for place in (f"{server}/data/", f"{server}/data/**/*.tar", f"{server}/data"):
        data = hr.stream(place)
        assert [sample["__key__"] for sample in data] == ["0", "1", "&2", "é3"], place
    assert "skipped: 1 about the data" in hr.stream(f"{server}/data/").describe()
    assert [sample["__key__"] for sample in hr.stream(f"{server}/data/*.tar")] == ["0", "1"]
    with pytest.raises(OptionError, match="has no object to read"):
        hr.stream(f"{server}/data/no-such-folder/")
    if "nginx" in request.node.name:
        with pytest.raises(AccessDeniedError, match=r"does not show what this folder has.*as a list"):
            hr.stream(f"{server}/")


def test_classes_of_a_server_are_called_as_on_a_disk(folder: Path, server: str) -> None:
    for name in ("zebra/1 a%20.txt", "école/2.txt"):
        (folder / "data/of" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data/of" / name).write_bytes(name.encode())
    for pattern in (None, "{label}/{name}.txt"):
        on_disk = hr.folder(f"{folder}/data/of", pattern=pattern)
        data = hr.folder(f"{server}/data/of/", pattern=pattern)
        assert data.source.classes == on_disk.source.classes == ("zebra", "école")
        names = ("__key__", "label", "name", "txt")
        said, meant = ([tuple(map(sample.get, names)) for sample in some] for some in (data, on_disk))
        assert sorted(said) == sorted(meant)
        assert ": zebra, école" in data.describe()
    assert {sample["__url__"] for sample in data} == {
        f"{server}/data/of/zebra/1%20a%2520.txt",
        f"{server}/data/of/%C3%A9cole/2.txt",
    }


def test_size_that_a_server_tells_is_compared(folder: Path, server: str, request: pytest.FixtureRequest) -> None:
    data = hr.files(f"{server}/data/0.t*")
    (folder / "data/0.tar").write_bytes(b"short")
    if "json" not in request.node.name:
        assert data[0]["tar"] == b"short"
        return
    with pytest.raises(
        hr.errors.ObjectChangedError, match=r"than was listed: it had 10240 bytes then, and has 5.*0\.tar"
    ):
        data[0]


def test_page_of_apache_has_what_lies_in_the_folder_once() -> None:
    page = page_of("http://h/data/", APACHE)
    assert [one.path for one in page.files] == ["a%20b.tar", "x&y.tar", "k:v.tar", "z.tar"]
    assert page.folders == ["deep/"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<!doctype html><title>Welcome to us</title><a href='a.tar'>a</a>", r"no index.*title is 'Welcome to us'"),
        (b"<html><body>It works!", "no index of a folder; give"),
        (b"", "no index"),
        (b"\x00\xff\x01 not a page", "no index"),
        (b'[{"names": 1}]', "the JSON that is there is no index"),
        (b'["a", "b"]', "the JSON that is there is no index"),
        (b"[1, 2", "the JSON that is there is no index"),
    ],
)
def test_page_that_is_no_index_is_an_error_that_says_so(body: bytes, why: str) -> None:
    with FaultServer() as server:
        server.add("data/", body)
        for place in ("data/", "data/*.tar"):
            with pytest.raises(OptionError, match=f"data/ cannot be listed: .*{why}"):
                hr.stream(f"{server.url}/{place}")


@pytest.mark.slow
def test_folders_that_go_in_a_circle_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sources.entries._ATTEMPTS", 1)
    with FaultServer() as server:
        for depth in range(1, 70):
            server.add("a/" * depth, b"<title>Index of /</title><a href='a/'>a</a>")
        with pytest.raises(hr.StorageError, match="more than 64 deep"):
            hr.stream(f"{server.url}/a/")


def test_folder_that_an_index_names_and_the_server_does_not_have_is_an_error() -> None:
    with FaultServer() as server:
        server.add("a/", b"<title>Index of /</title><a href='b/'>b</a><a href='c/'>c</a>")
        server.add("a/b/", b"<title>Index of /</title><a href='1.tar'>1</a>")
        with pytest.raises(hr.errors.ObjectMissingError, match=r"above has this one, and the server does not.*a/c/"):
            hr.stream(f"{server.url}/a/")
        assert len(hr.files(f"{server.url}/a/b/*.tar")) == 1
