"""An S3 server in a thread, as tests use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.server import ThreadedMotoServer


@contextmanager
def client_of(bucket: str) -> Iterator[Any]:
    """A client of boto3's for a server with one bucket; its `meta.endpoint_url` is the address."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    client.create_bucket(Bucket=bucket)
    try:
        yield client
    finally:
        client.close()
        server.stop()
