"""What no loader can pass on this machine, now: the work itself in two processes, or the reads, with nothing around it.

A contestant like the others ("limit"), so that it is measured in the same rounds: the ratio to it holds where absolute
numbers of a shared machine do not. `limits.py --workload W2` is `run.py --workload W2 --contestant limit`.

    apply-2p      every sample's body, in memory, through the workload's own function
    own-2p        W2: the same by headrace's own decoder
    place-2p      W5: the same, and each sample copied once to its place in a batch that is used again
    copy          W5: one thread copies as many batches, each from one place in memory to another
    obstore-256   W3, W3s, W6, W6n: a client alone, with so many reads in flight; aiohttp, and headrace's Reader, too

Where a workload has several, the fastest of a round is its limit; "copy" is none.
"""

from __future__ import annotations

import os
import struct
import sys
import tarfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from contestants import Batches
from data import DATA
from workloads import Work, tar_samples

from headrace.formats.media import ImageDecoder

VARIANTS: dict[str, dict[str, Any]] = {
    "apply-2p": {"processes": 2},
    "own-2p": {"processes": 2, "own": True},
    "place-2p": {"processes": 2, "place": True},
    "copy": {"processes": 1},
}
CLIENTS = ("obstore", "aiohttp", "reader")
VARIANTS |= {f"{client}-{n}": {"client": client, "concurrency": n} for client in CLIENTS for n in (128, 256, 512)}
WORKLOADS = {name: ["apply-2p"] for name in ("W1", "W1b", "W1t", "W2", "W4")} | {"W5": ["place-2p", "copy"]}
WORKLOADS["W2"] += ["own-2p"]
WORKLOADS |= {
    name: [f"{client}-{n}" for client in CLIENTS] for name, n in (("W3", 256), ("W3s", 512), ("W6", 128), ("W6n", 128))
}
PACKAGES = ["torch", "pillow", "obstore", "aiohttp"]

_bodies: list[Any] = []


def prepare(work: Work, parameters: Mapping[str, Any]) -> None:
    """Read the epoch into memory, unless a client is to read it."""
    torch.set_num_threads(1)
    if "client" in parameters:
        import raw_clients  # noqa: F401 - here and not in the time

        return
    if work.kind == "local":
        _bodies[:] = range(work.samples)
    elif work.kind == "files":
        _bodies[:] = [(DATA / work.bucket / key).read_bytes() for key, *_ in work.reads()]
    else:
        for shard in work.shards():
            with tarfile.open(DATA / work.bucket / shard) as tar:
                members = ((member.name, _content(tar, member)) for member in tar)
                _bodies.extend(body for body, _ in tar_samples(members))
    work.apply(_bodies[0])


def run(work: Work, parameters: Mapping[str, Any]) -> Batches:
    """One epoch's work; then all labels at once, with an empty tensor: nothing was moved."""
    if "client" in parameters:
        import raw_clients

        assert raw_clients.read_all(work, parameters["client"], parameters["concurrency"]) == work.payload_bytes()
    else:
        _work(work, parameters)
    yield torch.empty(work.samples, 0), torch.tensor([work.label(index) for index in range(work.samples)])


def _work(work: Work, parameters: Mapping[str, Any]) -> None:
    first = work.apply(_bodies[0])
    batch = torch.zeros(work.batch, *first.shape, dtype=first.dtype)
    source = torch.ones_like(batch)

    decode = ImageDecoder("rgb8", (224, 224)) if parameters.get("own") else work.apply

    def apply(start: int) -> None:
        for body in _bodies[start : start + work.batch]:
            decode(body)

    def place(start: int) -> None:
        for slot, body in enumerate(_bodies[start : start + work.batch]):
            batch[slot].copy_(work.apply(body))

    def copy(_start: int) -> None:
        batch.copy_(source)

    step = place if parameters.get("place") else apply if parameters["processes"] == 2 else copy
    _share(step, range(0, work.samples, work.batch), parameters["processes"])


def _share(step: Callable[[int], None], starts: range, processes: int) -> None:
    """`step(start)` for all starts by so many processes; whoever is free takes the next one out of a pipe."""
    source, sink = os.pipe()
    for start in starts:
        os.write(sink, struct.pack("i", start))
    os.close(sink)
    children = []
    for _ in range(processes - 1):
        if child := os.fork():
            children.append(child)
            continue
        try:
            _take_steps(step, source)
            os._exit(0)
        finally:
            os._exit(1)
    _take_steps(step, source)
    os.close(source)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, status


def _take_steps(step: Callable[[int], None], source: int) -> None:
    while word := os.read(source, 4):
        step(*struct.unpack("i", word))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file
    return file.read()


if __name__ == "__main__":
    import run as benchmark

    benchmark.main(["--contestant", "limit", *sys.argv[1:]])
