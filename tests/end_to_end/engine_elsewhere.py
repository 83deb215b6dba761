"""A process that runs epochs of others' loaders: it has the job and the plans as bytes, and nothing of the trainer."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from headrace.deliver.iterator import BatchIterator, Watcher
from headrace.deliver.opening import Arrived, BatchOpener
from headrace.deliver.slabs import Views
from headrace.delivery import ChunkDelivery, Delivery
from headrace.engine.blueprint import Blueprint
from headrace.engine.packing import JobUnpacker
from headrace.errors import OptionError
from headrace.runtime import Runtime
from headrace.torch_compat import serialize

TRAINERS = ("DataLoader", "Streaming", "NextEpoch", "ThreadHost", "DirectCalls")
_LENGTH = struct.Struct("<Q")


class Wire:
    """Messages over two pipes."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target

    def send(self, *message: object) -> None:
        data = pickle.dumps(message)
        self._target.write(_LENGTH.pack(len(data)) + data)
        self._target.flush()

    def receive(self) -> Any:
        head = self._source.read(_LENGTH.size)
        return None if not head else pickle.loads(self._source.read(*_LENGTH.unpack(head)))


class Written:
    """What `serialize.pack_for_workers` gives, as bytes."""

    def __init__(self, parts: list[Any], descriptors: list[int]) -> None:
        assert not descriptors, "nothing of these cases is shared"
        self.data = bytearray(serialize.packed_size(parts))
        self.lengths = serialize.write(parts, memoryview(self.data))

    def read(self, unpack: Callable[..., Any]) -> Any:
        return unpack(memoryview(self.data), self.lengths, [])


class CallsOverPipe:
    """`TrainerCalls` of a host in another process: one call is carried over, and the other one refused."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def decide(self, error: BaseException) -> object:
        self._wire.send("decide", serialize.pack_error(error))
        return self._wire.receive()[0]

    def samples_of(self, data: Any) -> Any:
        raise OptionError(f"samples of {data.name} belong to the loop of an `async for` in another process")


class Recording(BatchOpener):
    """Keeps what was delivered, without what opens it: that is of its process."""

    def __init__(self, into: list[Arrived], views: Views) -> None:
        super().__init__(views)
        self._into = into

    def arrived(self, message: Delivery | ChunkDelivery) -> list[Arrived]:
        found = list(super().arrived(message))
        self._into += [one._replace(open=list) for one in found]
        return found


def all_of(iterator: Iterator[object]) -> Iterator[object]:
    """The batches, and what is raised in the place of one."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield error


def plain(batch: object) -> object:
    """A batch or an exception as it can be compared."""
    if isinstance(batch, Exception):
        return type(batch).__name__, str(batch)
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def run(wire: Wire, job: Written, plans: list[Written]) -> list[list[tuple[object, Arrived]]]:
    """Of each epoch what was delivered, and the batches."""
    unpacker = job.read(JobUnpacker)
    settings = replace(unpacker.job.settings, collate=None, init=None, skips=None)
    epochs = []
    with contextlib.closing(Runtime(settings, workers="thread")) as runtime:
        blueprint = Blueprint(unpacker.job, runtime.parts.of_samples, runtime.fetch_meter)
        for plan in plans:
            deliveries: list[Arrived] = []
            reader = runtime.reader(blueprint.storage_options)
            spec = blueprint.spec(plan.read(unpacker.unpack), reader, CallsOverPipe(wire), runtime.meters)
            batches: BatchIterator[object] = runtime.iterate(
                None, spec, Watcher(name="elsewhere"), blueprint.prepare, partial(Recording, deliveries)
            )
            opened = [plain(batch) for batch in all_of(batches)]
            epochs.append(list(zip(opened, deliveries, strict=True)))
    assert [type(one).__name__ for one in gc.get_objects() if type(one).__name__ in TRAINERS] == []
    return epochs


def main() -> None:
    wire = Wire(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what is printed is no message
    while (message := wire.receive()) is not None:
        try:
            wire.send("done", run(wire, *message))
        except Exception as error:
            wire.send("failed", type(error).__name__, str(error), traceback.format_exc())


if __name__ == "__main__":
    main()
