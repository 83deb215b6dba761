"""Clients with nothing around them: how many reads of a workload each can make here, with so many in flight.

They run on the loop that headrace runs on where it is installed, uvloop, and hold a body no longer than to count it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import obstore
import uvloop
from workloads import Read, Work

from headrace.fetch import Reader

Get = Callable[[str, Read], Awaitable[int]]
"""A sample's bytes at this address, counted."""


@contextlib.asynccontextmanager
async def obstore_client(_concurrency: int) -> AsyncIterator[Get]:
    """obstore's HTTPStore."""
    root = os.environ["HEADRACE_BENCH_SERVER"]
    store = obstore.store.HTTPStore.from_url(root, client_options={"allow_http": True})

    async def get(url: str, read: Read) -> int:
        path = url[len(root) + 1 :]
        if read.stop is None:
            return len(await (await store.get_async(path)).bytes_async())
        return len(await store.get_range_async(path, start=read.start, end=read.stop))

    yield get


@contextlib.asynccontextmanager
async def aiohttp_client(concurrency: int) -> AsyncIterator[Get]:
    """aiohttp's ClientSession."""
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as session:

        async def get(url: str, read: Read) -> int:
            async with session.get(url, headers=read.headers) as answer:
                return len(await answer.read())

        yield get


@contextlib.asynccontextmanager
async def reader_client(concurrency: int) -> AsyncIterator[Get]:
    """headrace's Reader: its client with its checks, retries and limits, and no loader."""
    async with Reader(concurrency=concurrency) as reader:

        async def get(url: str, read: Read) -> int:
            return len(await reader.read(url, None if read.stop is None else read.start, read.stop))

        yield get


CLIENTS = {"obstore": obstore_client, "aiohttp": aiohttp_client, "reader": reader_client}


def read_all(work: Work, client: str, concurrency: int) -> int:
    """Bytes of all samples of a workload, read by so many tasks."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_read_all(work, client, concurrency))


async def _read_all(work: Work, client: str, concurrency: int) -> int:
    reads = iter(work.drawn_reads())

    async def take() -> int:
        return sum([await get(work.url(read.key), read) for read in reads])

    async with CLIENTS[client](concurrency) as get:
        return sum(await asyncio.gather(*(take() for _ in range(concurrency))))
