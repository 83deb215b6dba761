"""An object store on this machine: our own nginx on a free loopback port, which waits, refuses and counts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MODULES = Path("/usr/lib/nginx/modules")
DEBIAN_PACKAGES = "nginx libnginx-mod-http-lua"
COUNTERS = ("requests", "throttled", "asked_bytes", "sent_bytes", "peak_in_flight")
CONFIGURATION = """\
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {place}/nginx.pid;
env HEADRACE_BENCH_ROOT;
error_log {place}/error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  default_type application/octet-stream;
  sendfile on; tcp_nopush on; tcp_nodelay on;
  keepalive_timeout 600; keepalive_requests 100000000;
  open_file_cache max=20000 inactive=1h; open_file_cache_valid 1h;
  client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
  lua_package_path "/usr/share/lua/5.1/?.lua;;";
  lua_shared_dict counters 1m;
  init_by_lua_block {{ server = dofile("{place}/server.lua") }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    root {root};
    location = /stats {{ content_by_lua_block {{ server.stats() }} }}
    location = /reset {{ content_by_lua_block {{ server.reset() }} }}
    location / {{
      rewrite_by_lua_block {{ server.delay() }}
      log_by_lua_block {{ server.count() }}
    }}
  }}
}}
"""


class Server:
    """Serves the files of `root` as `{url}/{delay}/{path}` while the context is open; server.lua has the delays.

    `prepare` is called before it starts. One nginx worker: it shares the cores with the loaders that are measured. It
    ends with this process, however that ends.

    Raises:
        SystemExit: nginx or its lua module is missing; the text says what to install.
    """

    def __init__(self, root: Path, prepare: Callable[[], object] | None = None) -> None:
        self.root, self._prepare = root, prepare
        self.url = ""
        self._place = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if not program or not (MODULES / "ngx_http_lua_module.so").exists():
            raise SystemExit(f"the benchmarks' server needs: apt-get install {DEBIAN_PACKAGES}")
        if self._prepare:
            self._prepare()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._place = tempfile.mkdtemp(prefix="headrace-bench-")
        place = Path(self._place)
        shutil.copy(Path(__file__).with_name("server.lua"), place)
        user = "user root;" if os.getuid() == 0 else ""
        (place / "nginx.conf").write_text(
            CONFIGURATION.format(modules=MODULES, user=user, place=place, port=port, root=self.root)
        )
        command = [program, "-p", self._place, "-e", f"{place}/error.log", "-c", f"{place}/nginx.conf"]
        if guard := shutil.which("setpriv"):  # a kill -9 of this process ends the server too
            command = [guard, "--pdeathsig", "TERM", *command]
        environment = os.environ | {"HEADRACE_BENCH_ROOT": str(self.root)}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        self._wait_until_it_answers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(10)
        shutil.rmtree(self._place, ignore_errors=True)

    def stats(self) -> dict[str, Any]:
        """What was asked of the server since the last reset, and the pid of its worker."""
        return read_stats(self.url)

    def reset(self) -> None:
        """Set the counters to 0."""
        _get(self.url + "/reset")

    def _wait_until_it_answers(self, timeout_s: float = 10.0) -> None:
        assert self._process
        end = time.monotonic() + timeout_s
        while True:
            try:
                self.stats()
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > end:
                    log = Path(self._place, "error.log").read_text()
                    self.__exit__(None, None, None)
                    raise SystemExit(f"nginx did not start: {log.strip() or error}") from error
                time.sleep(0.01)
            else:
                return


class NoServer(Server):
    """In the place of the object store, for benchmarks that read nothing."""

    def __init__(self) -> None:
        super().__init__(Path())

    def __enter__(self) -> Self:
        return self

    def stats(self) -> dict[str, Any]:
        return dict.fromkeys(("pid", *COUNTERS), 0)

    def reset(self) -> None:
        pass


def read_stats(url: str) -> dict[str, Any]:
    """The counters of the server at `url`, also from another process."""
    counters: dict[str, Any] = json.loads(_get(url + "/stats"))
    return counters


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
    return body


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
