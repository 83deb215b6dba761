"""What the examples share: real handwritten digits as tar shards, and servers on the loopback interface that hold them.

    python examples/digits.py shards     # writes shards/train-0000.tar ... shards/test-0001.tar

The digits are scikit-learn's: 1,797 scans of 8 by 8 pixels, each of which becomes two members of a shard, `000123.png`
and `000123.cls`.
"""

import io
import logging
import re
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

TRAIN = "train-{0000..0006}.tar"
TEST = "test-{0000..0001}.tar"


def read_scans() -> tuple[np.ndarray, np.ndarray]:
    """images [1797, 8, 8] uint8 and labels [1797], in an order that gives every shard all writers."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return np.rint(digits.images[order] * (255 / 16)).astype(np.uint8), digits.target[order]


def png(scan: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(scan).save(out, "PNG")
    return out.getvalue()


def make_shards() -> dict[str, bytes]:
    """Nine tar files by name, seven to train from and two to test with; always the same bytes."""
    images, labels = read_scans()
    names = [f"train-{n:04}.tar" for n in range(7)] + [f"test-{n:04}.tar" for n in range(2)]
    shards = {}
    for name, keys in zip(names, np.array_split(np.arange(len(labels)), len(names)), strict=True):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for key in keys:
                for field, data in (("png", png(images[key])), ("cls", b"%d" % labels[key])):
                    member = tarfile.TarInfo(f"{key:06}.{field}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        shards[name] = out.getvalue()
    return shards


def write_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in make_shards().items():
        (folder / name).write_bytes(data)


def make_net() -> nn.Module:
    """A small convolutional net, [B, 1, 8, 8] float32 to [B, 10]."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32), *block(32, 64), nn.MaxPool2d(2),
        *block(64, 64), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 in a thread of this process; gives the `storage_options` that reach it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {
            "endpoint": f"http://{host}:{port}",
            "access_key_id": "example",
            "secret_access_key": "example",
            "region": "us-east-1",
        }
    finally:
        server.stop()


def make_bucket(storage_options: Mapping[str, str], bucket: str) -> None:
    """Make `bucket` in the S3 of `s3_server`, which asks for no signature."""
    urllib.request.urlopen(urllib.request.Request(f"{storage_options['endpoint']}/{bucket}", method="PUT")).close()


def upload(storage_options: Mapping[str, str], bucket: str) -> None:
    """Put the shards into `bucket`; without keys in `storage_options` obstore takes those of the environment."""
    import obstore
    from obstore.store import S3Store

    plain = storage_options.get("endpoint", "").startswith("http://")
    store = S3Store(bucket, client_options={"allow_http": plain}, **storage_options)
    for name, data in make_shards().items():
        obstore.put(store, name, data)


@contextmanager
def http_server(objects: Mapping[str, bytes]) -> Iterator[str]:
    """A web server in a thread of this process that answers range requests; gives its address."""

    class Handler(RangeHandler):
        held = objects

    with _Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 512  # a loader opens many connections at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Of two requests for the same bytes a loader takes the answer that comes first, and hangs up on the other one.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class RangeHandler(BaseHTTPRequestHandler):
    """GET and HEAD of objects in memory, whole or by one range of bytes, as RFC 9110 has it."""

    protocol_version = "HTTP/1.1"
    timeout = 5  # seconds; a connection that was kept alive for nothing ends
    disable_nagle_algorithm = True
    held: Mapping[str, bytes] = {}

    def do_GET(self) -> None:
        data = self.held.get(self.path.partition("?")[0].lstrip("/"))
        if data is None:
            return self.answer(HTTPStatus.NOT_FOUND, b"no such object\n")
        etag = f'"{len(data)}"'  # the objects of an example never change
        if self.headers.get("If-Match", etag) not in (etag, "*"):
            return self.answer(HTTPStatus.PRECONDITION_FAILED, b"the object is another one\n")
        first, last = self.asked(len(data))
        if first is None:
            return self.answer(HTTPStatus.OK, data, ETag=etag)
        if first > last:
            return self.answer(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", **{"Content-Range": f"bytes */{len(data)}"}
            )
        span = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return self.answer(HTTPStatus.PARTIAL_CONTENT, data[first : last + 1], ETag=etag, **span)

    def do_HEAD(self) -> None:
        self.do_GET()

    def asked(self, size: int) -> tuple[int | None, int]:
        """The first and the last byte that are asked for; None where no range is, first > last where none fits."""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not match or not any(match.groups()):
            return None, 0
        first, last = match.groups()
        if not first:  # the last n bytes
            return (max(size - int(last), 0), size - 1) if int(last) else (1, 0)
        if int(first) >= size:
            return 1, 0
        return int(first), min(int(last) if last else size - 1, size - 1)

    def answer(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing: the example's own output matters."""


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "shards")
    write_shards(folder)
    print(f"{len(list(folder.glob('*.tar')))} shards in {folder}/")
