"""Streams: a source and operators on its samples, immutable and lazy."""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import re
import reprlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from headrace._util import check
from headrace._util.functions import is_async
from headrace.dataset.operators import Operators
from headrace.dataset.source import SampleSource, blocking
from headrace.errors import HeadraceError, printable
from headrace.ops.operator import Operator, counted
from headrace.order.orders import ENDLESS
from headrace.pipeline.compile import compiled
from headrace.pipeline.pipeline import Pipeline
from headrace.torch_compat.tracebacks import trimming

if TYPE_CHECKING:
    from headrace.loader import DataLoader

log = logging.getLogger("headrace")

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class HasSource(Protocol):
    def __sample_source__(self) -> SampleSource: ...


class Stream(Operators):
    """Samples of shards or of a data set, with operators on them.

    Created by `hr.stream`, `hr.files` and the operators of data sets. Pass it to `hr.DataLoader`, or iterate over it.

    Examples:
        >>> stream = hr.from_map(range(4)).map(lambda n: n * n)
        >>> len(stream), stream[3], list(stream)
        (4, 9, [0, 1, 4, 9])
    """

    def __init__(self, source: HasSource, operators: tuple[Operator, ...] = ()) -> None:
        self.source = source
        self.operators = operators
        self.pipeline()  # raises for operators that cannot be combined

    def __len__(self) -> int:
        """Return the number of samples (or batches) in an epoch. TypeError if it is not known."""
        pipeline = self.pipeline()
        if not pipeline.source.traits.numbered:
            raise TypeError(
                f"{self!r} has no length: its samples are counted while they are read. Progress bars take a number of "
                "batches that you know, such as tqdm(loader, total=100)"
            )
        if any(step.kind == "filter" for step in pipeline.steps) or (pipeline.keeps and not pipeline.has_numbers):
            raise TypeError(f"{self!r} has no length: the number of samples that pass a filter is known only later")
        if pipeline.gives_many is not None:
            raise TypeError(f"{self!r} has no length: how many samples {pipeline.gives_many} gives is known only later")
        source = pipeline.source
        passing = source.passing(pipeline.keeps)
        count = counted(source.count() if passing is None else len(passing), self.operators)
        if count >= ENDLESS:
            raise TypeError(f"{self!r} has no length: it has no end")
        return count

    def __bool__(self) -> bool:
        """False if an epoch is known to have no samples."""
        try:
            return len(self) > 0
        except TypeError:
            return True

    async def aget(self, key: Any) -> Any:
        """Return the sample with this key (or number) in the source's own order, after all steps.

        Raises:
            TypeError: The source has no keys, or operators remove, group or reorder samples.
        """
        pipeline = self.pipeline()
        if not pipeline.source.traits.numbered or not pipeline.is_in_place:
            raise TypeError(
                f"{self!r} gives no sample by its number: shards need an index, and maps are all that may follow"
            )
        sample = await pipeline.source.aget(key, pipeline.wanted)
        for step in pipeline.narrowed_steps:
            sample = await step.fn(sample) if is_async(step.fn) else step.fn(sample)
        return sample

    def __getitem__(self, key: Any) -> Any:
        source = self.source.__sample_source__()
        opens = source.opens if source.traits.numbered else None

        async def get() -> Any:
            if opens is None:
                return await self.aget(key)  # raises the reason
            await opens.aopen()
            try:
                return await self.aget(key)
            finally:
                await opens.aclose()

        with trimming:
            return blocking(get)

    def keys(self) -> Sequence[Any]:
        """Return the keys of the samples in the source's own order. An index has those in `__key__`."""
        source = self.source.__sample_source__()
        if not source.traits.numbered:
            raise TypeError(f"{self!r} has no keys; shards need an index for that")
        return source.keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples())

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._samples())

    def _samples(self) -> DataLoader[Any]:
        from headrace.loader import single_samples  # imports torch

        return single_samples(self)

    def indexed(self, why: str = "") -> Stream:
        """Return the stream with an index in this machine's cache, made if missing, and log `why`.

        The stream itself if its samples have numbers, or if no index can be made.
        """
        found = self.pipeline().source.indexed()
        if found is None:
            return self
        if why:
            log.warning(
                "%s an index of the shards, and one is made first where it is missing: of the headers of tar archives; "
                "other shards are read once for it. `headrace index` makes it once for all",
                why,
            )
        return Stream(found.source, (*found.operators, *self.operators))

    def __repr__(self) -> str:
        named = (operator.text for operator in self.operators if not operator.is_implied)
        return printable(".".join([self.source.__sample_source__().text, *named]))

    def describe(self, samples: int = 0) -> str:
        """Describe the stream: its source, how that was detected, and its operators, one per line.

        Args:
            samples: Number of samples to read and describe. 0: no request is made.
        """
        source = self.source.__sample_source__()
        lines = [repr(Stream(self.source)), *(f"  {of}: {what}" for of, what in source.facts)]
        try:
            if source.has_count:
                lines.append(f"  samples: {f'{count:,}' if (count := source.count()) < ENDLESS else 'without end'}")
        except (HeadraceError, TypeError, OSError) as error:
            lines.append(f"  samples: not known: {error}")
        for number, (name, stream) in enumerate(source.inputs, 1):
            begin, rest = ("├─ ", "│  ") if number < len(source.inputs) else ("└─ ", "   ")
            first, *more = stream.describe().splitlines()
            lines += [f"  {begin}{name}: {first}", *(f"  {rest}{line}" for line in more)]
        lines += [f"  .{operator.text}  [{operator.where}]" for operator in self.operators if not operator.is_implied]
        if samples:
            lines += [f"  first: {line}" for line in told(self.take(samples))]
        return printable("\n".join(lines))

    def __getattr__(self, name: str) -> NoReturn:
        near = [] if name.startswith("_") else difflib.get_close_matches(name, dir(type(self)), 1)
        advice = f". Did you mean: {near[0]!r}?" if near else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def without_short_batches(self) -> Stream:
        """Return the stream with `drop_last` set on the operator that makes its batches."""
        for k, operator in reversed([*enumerate(self.operators)]):
            if (whole := operator.whole) is not None:
                return Stream(self.source, (*self.operators[:k], whole, *self.operators[k + 1 :]))
        if self.pipeline().is_batched:
            remedy = "set it there: .batch(n, drop_last=True)"
            raise check.conflict("drop_last=True", f"{self!r}, whose inputs make the batches", remedy)
        return self

    def pipeline(self) -> Pipeline:
        """Sort the operators by what executes them.

        Raises:
            OptionError: Two operators cannot be combined.
        """
        return compiled(self.source.__sample_source__(), self.operators)

    def _as_stream(self) -> Stream:
        return self

    def _with(self, operator: Operator) -> Stream:
        return Stream(self.source, operator.behind(self.operators))


_WIDTH = 100
_FIELDS = 40
_BYTES = 24
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def told(samples: Iterable[object]) -> Iterator[str]:
    """Yield lines that describe samples: their fields with types, sizes and first contents."""
    for number, sample in enumerate(samples):
        if number:
            yield ""
        if not isinstance(sample, Mapping):
            yield value_in_words(sample)
            continue
        for name, value in itertools.islice(sample.items(), _FIELDS):
            yield f"{_line(str(name))}: {value_in_words(value)}"
        if len(sample) > _FIELDS:
            yield f"… and {len(sample) - _FIELDS} more fields"


def value_in_words(value: Any) -> str:
    if isinstance(value, str):
        return _line(repr(value[: _WIDTH + 1]) + (f" ({len(value):,} characters)" if len(value) > _WIDTH else ""))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value):,} bytes, {bytes(value[:_BYTES])!r}{'…' if len(value) > _BYTES else ''}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} {list(shape)} {dtype}"
    if isinstance(value, list | tuple | dict | set):
        return _line(f"{type(value).__name__} of {len(value):,}: {reprlib.repr(value)}")
    return _line(f"{type(value).__name__} {reprlib.repr(value)}")


def _line(text: str) -> str:
    """Return `text` as one line, without control characters that a terminal would obey."""
    text = _UNPRINTABLE.sub("·", text)
    return text if len(text) <= _WIDTH + 40 else f"{text[: _WIDTH + 40]}…"
