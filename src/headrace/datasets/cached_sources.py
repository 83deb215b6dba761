"""Samples that are kept once they were made, as a data set: how they are got, and made where they are not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from headrace.datasets.doing import through, through_first
from headrace.datasets.made import MadeDataset, MadeSource
from headrace.datasets.source import EpochIO, KeepsKey, SampleSource, SourceOrders
from headrace.kept.file import NotAtOnceError, SampleFile
from headrace.kept.keeping import Keeping, Writer
from headrace.producer import Producer
from headrace.running import running_threads
from headrace.tasks import Step
from headrace.torch_compat import serialize
from headrace.types import Ints

_AT_ONCE = getattr(os, "RWF_NOWAIT", 0)


class Kept(NamedTuple):
    """A sample that was made before, as it was kept."""

    data: NDArray[np.uint8]


class Fresh(dict[str, Any]):
    """A sample that is to be made, and its number; errors find its key, and where it is from, as in others."""

    @staticmethod
    def of(number: int, sample: Any) -> Fresh:
        named = isinstance(sample, dict)
        names = {name: sample[name] for name in ("__key__", "__url__") if name in sample} if named else {}
        return Fresh(names, number=number, sample=sample)


class CachedDataset(MadeDataset):
    """The samples of a source by their numbers: what is kept of each, or what it is made of.

    Args:
        source: its samples have numbers.
        first: the coroutine functions that are the first of the steps, with what opens samples for them.
        keeping: where samples are kept.
        wanted: what the steps use of the source's samples.
        text: what is shown.
    """

    def __init__(self, source: SampleSource, first: Sequence[Step], keeping: Keeping, wanted: Any, text: str) -> None:
        self._source, self.first, self.keeping, self.wanted, self.text = source, tuple(first), keeping, wanted, text

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_keys"}

    def __sample_source__(self) -> SampleSource:
        return CachedSource(self)

    @property
    def inner(self) -> SampleSource:
        return self._source

    def __len__(self) -> int:
        return self.inner.count()

    async def aget(self, key: int) -> Kept | Fresh:
        return await self.got(self.keeping.last_file(), range(len(self))[key])

    async def got(self, file: SampleFile | None, number: int) -> Kept | Fresh:
        """What a file has of a sample, or what it is made of."""
        data = None if file is None else await _read(file, number)
        if data is not None:
            return Kept(data)
        return Fresh.of(number, await through_first(self.first, await self.original(number, self.wanted)))


async def _read(file: SampleFile, number: int) -> NDArray[np.uint8] | None:
    """What a file has of a sample: from memory now, from a disk in a thread."""
    if not file.is_on_disk:
        return file.read(number)
    if _AT_ONCE:
        try:
            return file.read(number, flags=_AT_ONCE)
        except NotAtOnceError:
            pass
    return await anyio.to_thread.run_sync(file.read, number, limiter=running_threads.get())


class CachedSource(MadeSource):
    """Samples that are kept; all else is as the source has it."""

    def __init__(self, data: CachedDataset) -> None:
        super().__init__(data)
        self.data: CachedDataset = data

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def text(self) -> str:
        return self.data.text

    @property
    def is_endless(self) -> bool:
        return self._inner.is_endless

    @property
    def is_compressed(self) -> bool:
        return self._inner.is_compressed

    @property
    def answers_keys(self) -> bool:
        return self._inner.answers_keys

    @property
    def starts(self) -> Ints:
        return self._inner.starts

    def keys(self) -> Sequence[object]:
        return range(self.count())

    @property
    def has_lengths(self) -> bool:
        return self._inner.has_lengths

    def lengths(self) -> Ints:
        return self._inner.lengths()

    def passing(self, keeps: tuple[KeepsKey, ...]) -> Ints | None:
        return self._inner.passing(keeps)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()

    def fingerprint_with(self, sizes: Ints) -> str:
        return self._inner.fingerprint_with(sizes)

    def at_revision(self, fingerprint: str) -> str:
        return self._inner.at_revision(fingerprint)

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:
        return SourceOrders(self, keeps) if self._inner.is_in_order else self._inner.orders(keeps, seed)

    def open(self, io: EpochIO) -> Producer:
        return io.keys(self.data, partial(self.data.got, self.data.keeping.file()), None)


class CacheStep:
    """Makes the samples that are not kept, keeps them, and gives the others as they were kept.

    Args:
        steps: what is done to each.
        keeping: where samples are kept.
    """

    def __init__(self, steps: Sequence[Step], keeping: Writer) -> None:
        self._steps = tuple((step.told, step.kind, step.fn) for step in steps)
        self._keeping = keeping

    def __call__(self, sample: Kept | Fresh) -> Any:
        if type(sample) is Kept:
            try:
                return _unpacked(sample.data)
            except Exception as error:
                error.add_note("what is kept of it cannot be loaded here; another version= has it made anew")
                raise
        assert type(sample) is Fresh
        made = self._made(sample["sample"])
        self._keeping.add(sample["number"], partial(_packed, made))
        return made

    def _made(self, sample: Any) -> Any:
        return through([(name, function) for name, _, function in self._steps], sample)


def is_kept(step: Step) -> bool:
    """Whether samples are kept as they are behind this step."""
    return isinstance(step.fn, CacheStep)


class CacheManyStep(CacheStep):
    """The same where none or many may come of a sample: it gives a list."""

    def _made(self, sample: Any) -> list[Any]:
        samples = [sample]
        for name, kind, function in self._steps:
            try:
                if kind == "map":
                    samples = [function(one) for one in samples]
                elif kind == "filter":
                    samples = [one for one in samples if function(one)]
                else:
                    samples = [part for one in samples for part in function(one)]
            except Exception as error:
                error.add_note(f"stage: {name}")
                raise
        return samples


def _packed(value: object) -> bytearray:
    """A sample as it is kept: how long the pickle and each of its buffers are, and then these."""
    parts = serialize.pack_by_name(value)
    head = serialize.aligned(8 + 8 * len(parts))
    data = bytearray(head + serialize.packed_size(parts))
    lengths = serialize.write(parts, memoryview(data)[head:])
    np.frombuffer(data, np.int64, 1 + len(parts))[:] = len(parts), *lengths
    return data


def _unpacked(data: NDArray[np.uint8]) -> Any:
    """The sample; its arrays are views of `data`."""
    count = int(data[:8].view(np.int64)[0])
    lengths = data[8 : 8 + 8 * count].view(np.int64).tolist()
    return serialize.unpack(data.data[serialize.aligned(8 + 8 * count) :], lengths, copy=False)
