"""`.cache()`: samples that later epochs neither read nor make again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.context import running_threads
from headrace._util.shared_memory import aligned
from headrace.dataset.asynchronous import MadeDataset, MadeSource
from headrace.dataset.source import KeepsKey, SampleSource, SourceOrders, Wanted, forwarded
from headrace.dataset.stream import Stream
from headrace.ops.operator import EachSample, Operator
from headrace.ops.run_inline import split_steps, through, through_first
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.readers.protocol import Producer
from headrace.sample_cache.file import NotAtOnceError, SampleFile, place_of
from headrace.sample_cache.lookup import Keeping, NotKnownError, ValueDigest, Writer, fingerprint_of, not_told
from headrace.torch_compat import serialize
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.engine.open_readers import EpochIO

_CALL = ".cache()"


def cache(
    stream: Stream, place: str | os.PathLike[str] | None, max_bytes: int | None, version: str | int | None
) -> Stream:
    check.whole_or_none(".cache(): max_bytes", max_bytes, 1)
    stream, later = _divided(stream)
    pipeline = stream.pipeline()
    _check(pipeline)
    first, steps = split_steps(pipeline.narrowed_steps, "what is kept", _CALL)
    for step in (step for step in (*first, *steps) if not step.reads):
        _check_step(step, has_version=version is not None)
    where, source = place_of(place, max_bytes), pipeline.source
    keeping = Keeping(
        [step.fn for step in steps if not step.reads],
        [step.fn for step in first if not step.reads],
        where,
        None if version is None else str(version),
        partial(_told_of, source, has_version=version is not None) if where.is_shared else None,
        partial(_number_count, source),
    )
    others = tuple(one for one in stream.operators if not one.is_step or one.keeps_key in pipeline.keeps)
    text = ".".join([source.text, *(one.text for one in pipeline.each if not one.is_implied)])
    data = CachedDataset(source, first, keeping, pipeline.wanted, text)
    is_many, is_random = not pipeline.keeps_count, any(step.random for step in steps)
    makes = (CacheManyStep if is_many else CacheStep)(steps, keeping)
    name = f"cache({'' if place is None else where})"
    made = EachSample(Step(name, "many" if is_many else "map", makes, is_random))
    return Stream(data, (*others, made, *later))


def _divided(stream: Stream) -> tuple[Stream, tuple[Operator, ...]]:
    """Split the operators that make batches, count or limit samples from those before, whose samples are cached."""
    operators = stream.operators
    first = next(
        (k for k in range(len(operators)) if _regroups(Stream(stream.source, operators[: k + 1]).pipeline())), None
    )
    if first is None:
        return stream, ()
    own = next((one for one in operators[first:] if one.is_of_user), None)
    if own is not None:
        remedy = f"put {_CALL} before .{operators[first].text}"
        raise refusal("single samples", _CALL, f".{own.text}", remedy=remedy)
    return Stream(stream.source, operators[:first]), operators[first:]


def _regroups(pipeline: Pipeline) -> bool:
    is_counted = pipeline.limit is not None or pipeline.numbered is not None
    return is_counted or pipeline.group is not None or bool(pipeline.regroups)


def _number_count(source: SampleSource) -> int:
    """Return how many numbers samples may have. Mixtures may leave some of them out."""
    return int(source.starts[-1])


def _check(pipeline: Pipeline) -> None:
    source = pipeline.source
    if source.without_numbers is not None:
        raise refusal("numbers", _CALL, source.name, remedy=source.without_numbers)
    if source.only_in_order is not None:
        raise refusal("random access", _CALL, source.name, remedy=source.only_in_order)
    if source.is_paired or not source.keeps_numbers:
        raise refusal("lasting numbers", _CALL, f"{source.text:.100}", remedy=f"put {_CALL} after each of its inputs")


def _check_step(step: Step, *, has_version: bool) -> None:
    """Check that changes of a step are detected, and that its results do not vary."""
    found = ValueDigest()
    try:
        found.of(step.fn)
    except NotKnownError as error:
        if not has_version:
            raise not_told(error) from error
    if step.random and found.draws is not None:
        raise refusal("same results", _CALL, f"{step.name}, which draws random numbers ({found.draws})")


def _told_of(source: SampleSource, *, has_version: bool) -> bytes:
    """Return a digest that distinguishes a source's samples from others in a shared location."""
    parts: list[object] = [source.fingerprint_with(source.starts[1:] - source.starts[:-1])]
    parts.append([_status(url) for url in source.urls])
    if not has_version:
        parts.append(source.data)
    try:
        return fingerprint_of(parts)
    except NotKnownError as error:
        raise not_told(error) from error


def _status(url: str) -> tuple[int, int] | None:
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        with suppress(OSError):
            status = Path(parts.path if parts.scheme else url).stat()
            return status.st_size, status.st_mtime_ns
    return None


_AT_ONCE = getattr(os, "RWF_NOWAIT", 0)


class Kept(NamedTuple):
    data: NDArray[np.uint8]


class Fresh(dict[str, Any]):
    """A sample to be processed and cached, with its number. Errors find its key and address."""

    @staticmethod
    def of(number: int, sample: Any) -> Fresh:
        named = isinstance(sample, dict)
        names = {name: sample[name] for name in ("__key__", "__url__") if name in sample} if named else {}
        return Fresh(names, number=number, sample=sample)


class CachedDataset(MadeDataset):
    """The samples of a source by number: each cached, or as the steps' input.

    Args:
        source: Its samples have numbers.
        first: Coroutine steps, which run first, with the steps that decode samples for them.
        wanted: Fields of the source's samples that the steps use.
        text: Description.
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
        return _number_count(self.inner)

    async def aget(self, key: int) -> Kept | Fresh:
        return await self.got(self.keeping.last_file(), range(len(self))[key])

    async def got(self, file: SampleFile | None, number: int) -> Kept | Fresh:
        data = None if file is None else await _read(file, number)
        if data is not None:
            return Kept(data)
        return Fresh.of(number, await through_first(self.first, await self.original(number, self.wanted)))


async def _read(file: SampleFile, number: int) -> NDArray[np.uint8] | None:
    if not file.is_on_disk:
        return file.read(number)
    if _AT_ONCE:
        try:
            return file.read(number, flags=_AT_ONCE)
        except NotAtOnceError:
            pass
    return await anyio.to_thread.run_sync(file.read, number, limiter=running_threads.get())


class CachedSource(MadeSource):
    data: CachedDataset
    name = forwarded("_inner")
    text = forwarded("data")
    is_endless = forwarded("_inner")
    is_compressed = forwarded("_inner")
    answers_keys = forwarded("_inner")
    is_in_order = forwarded("_inner")
    is_steady = forwarded("_inner")
    can_permute = forwarded("_inner")
    check_order = forwarded("_inner")
    count = forwarded("_inner")
    starts = forwarded("_inner")
    has_lengths = forwarded("_inner")
    lengths = forwarded("_inner")
    passing = forwarded("_inner")
    fingerprint = forwarded("_inner")
    fingerprint_with = forwarded("_inner")
    at_revision = forwarded("_inner")

    async def aget(self, key: object, wanted: Wanted | None = None) -> object:
        return await super().aget(self._inner.number(key), wanted)

    def keys(self) -> Sequence[object]:
        return range(self.count())

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:
        return SourceOrders(self, keeps) if self._inner.is_in_order else self._inner.orders(keeps, seed)

    def open(self, io: EpochIO) -> Producer:
        return io.keys(self.data, partial(self.data.got, self.data.keeping.file()), None)


class CacheStep:
    def __init__(self, steps: Sequence[Step], keeping: Writer) -> None:
        self._steps = tuple((step.told, step.kind, step.fn) for step in steps)
        self._keeping = keeping

    def __call__(self, sample: Kept | Fresh) -> Any:
        if type(sample) is Kept:
            try:
                return _unpacked(sample.data)
            except Exception as error:
                error.add_note("what is kept of it cannot be loaded here; another version= replaces it")
                raise
        assert type(sample) is Fresh
        made = self._made(sample["sample"])
        self._keeping.add(sample["number"], partial(_packed, made))
        return made

    def _made(self, sample: Any) -> Any:
        return through([(name, function) for name, _, function in self._steps], sample)


def is_kept(step: Step) -> bool:
    return isinstance(step.fn, CacheStep)


class CacheManyStep(CacheStep):
    """A `CacheStep` whose steps may give none or several samples. The result is a list."""

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
    """Serialize a sample: the sizes of the pickle and of its buffers, then these."""
    parts = serialize.pack_by_name(value)
    head = aligned(8 + 8 * len(parts))
    data = bytearray(head + serialize.packed_size(parts))
    lengths = serialize.write(parts, memoryview(data)[head:])
    np.frombuffer(data, np.int64, 1 + len(parts))[:] = len(parts), *lengths
    return data


def _unpacked(data: NDArray[np.uint8]) -> Any:
    count = int(data[:8].view(np.int64)[0])
    lengths = data[8 : 8 + 8 * count].view(np.int64).tolist()
    return serialize.unpack(data.data[aligned(8 + 8 * count) :], lengths, copy=False)
