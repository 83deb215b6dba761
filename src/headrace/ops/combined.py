"""Several streams as one data set whose samples have numbers: specification, reading, sources, orders."""

from __future__ import annotations

import bisect
import functools
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Any, ClassVar, Self, SupportsIndex

import numpy as np

from headrace._util import check
from headrace._util.reads import Opens
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.operators import Operators
from headrace.dataset.source import KeepsKey, ReadsMany, SampleSource, SourceOrders, Traits, Wanted, forwarded
from headrace.dataset.stream import Stream
from headrace.errors import masked
from headrace.formats.format import Format
from headrace.formats.index import ShardIndex
from headrace.formats.pinned_object import for_each
from headrace.formats.tar.scanner import TAR
from headrace.indexes.index import Index, JoinedFiles
from headrace.ops.operator import EachSample, with_source
from headrace.ops.run_inline import NamedSteps, split_steps, through, through_first
from headrace.order.combined import TokenMixing
from headrace.order.orders import ENDLESS, Order, Passes, Places
from headrace.order.permutation import draw
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import Ordering, Pipeline, refusal
from headrace.readers.indexed_shards import Members
from headrace.sources.reading import OwnReaders
from headrace.sources.shards import IndexedShards, IndexedShardSource
from headrace.sources.synchronous import from_map
from headrace.types import Ints
from headrace.workers.tasks import Step

_NO_MAPS = frozenset(("IterableDataset", "Mapping", "bytes", "dict", "str"))  # types with __len__ and __getitem__
_WINDOW_SAMPLES = 16384  # window of each input
_WINDOW_BYTES = 128 * 2**20
_PASSES = 2**32  # more than an input repeats in one pass over all


class CombinedSpec(ABC):
    """Several streams, with their own operators, that form one data set, and the order of its samples.

    Attributes:
        has_own_numbers: True if samples are requested by their concatenated numbers in the inputs, whatever their
            positions.
        begins_again: True if an exhausted input repeats.
        is_in_turn: True for concatenated inputs, where one window is read at a time.
        adds_names: True if samples get the name of their input.
    """

    kind: ClassVar[str]
    has_own_numbers: ClassVar[bool] = False
    begins_again: ClassVar[bool] = False
    is_in_turn: ClassVar[bool] = False
    adds_names: ClassVar[bool] = False

    def __init__(self, streams: Sequence[Stream], names: Sequence[str] | None = None) -> None:
        self.streams = tuple(streams)
        self.names = tuple(map(str, range(len(streams)))) if names is None else tuple(names)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not hasattr(type(self), name)}  # nothing cached

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return tuple(stream.pipeline() for stream in self.streams)

    def checked(self) -> Self:
        """Return the specification if its streams can be inputs. OptionError if not."""
        check_apart(self.streams, self.call)
        for label, pipeline in zip(self.labels, self.pipelines, strict=True):
            check_input(label, pipeline, self.call)
        return self

    @property
    def sources(self) -> list[SampleSource]:
        return [pipeline.source for pipeline in self.pipelines]

    @property
    def call(self) -> str:
        """The user's call, for messages."""
        return f".{self.kind}()"

    @property
    def arguments(self) -> str:
        """Arguments of the method after the streams, for display."""
        return ""

    @property
    def text(self) -> str:
        first, *others = map(repr, self.streams)
        return f"{first}.{self.kind}({', '.join(others)}{self.arguments})"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"input {name} of {self.call}" for name in self.names)

    @property
    @abstractmethod
    def is_endless(self) -> bool: ...

    @property
    def is_in_order(self) -> bool:
        """True if samples are in their stored order, input by input."""
        return False

    @property
    def is_paired(self) -> bool:
        """True if a number names a sample of each of several inputs."""
        return False

    @property
    def is_steady(self) -> bool:
        """True if positions mean the same samples, whatever the seed and the epoch."""
        return all(one.order.is_steady and one.source.is_steady for one in self.pipelines)

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Number of samples of each input; may make requests."""
        return [min(ENDLESS, Planning(pipeline, 0).count()) for pipeline in self.pipelines]

    @property
    @abstractmethod
    def count(self) -> int:
        """Total number of samples; may make requests."""

    @property
    @abstractmethod
    def full_count(self) -> int | None:
        """Samples until each input has been used in full, for endless ones. None: not known."""

    @property
    def drawn_by_tokens(self) -> tuple[CombinedSpec, TokenMixing] | None:
        """For a mixture by tokens: its specification for row packing, and token shares."""
        return None

    @property
    def shares(self) -> Sequence[int] | None:
        """Samples of each input in some stretch. None: the shares change."""
        return [1] * len(self.names)

    def can_permute(self, by: str) -> bool:
        """True if a shuffle of this kind can change the combined order."""
        return not self.is_endless and (self.is_in_order or by == "global")

    def check_order(self, order: Ordering) -> None:
        """Raise OptionError if samples do not support an order."""
        first = next(iter(order.operators), None)
        if self.is_endless and first is not None and first.limit is None:
            raise refusal("end", f".{first.text}", self.call)

    def described(self) -> str:
        return f"{self.kind}({len(self.names)}{self.arguments})"

    def seed_of(self, seed: int, number: int) -> int:
        """Return the seed of an input, so that inputs of equal size get different orders."""
        return draw("input", seed, number)

    @abstractmethod
    def arrange(self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int) -> Order:
        """Return the combined order.

        Args:
            key: Seed, epoch and pass.
            first_shards: Offset of each input's shard numbers.
            window: Samples in a window.
        """

    def _passes_of_endless(self) -> Sequence[int] | None:
        """Return the samples in a pass over each endless input. None: not known."""
        endless = [one for one, size in zip(self.pipelines, self.sizes, strict=True) if size == ENDLESS]
        counts = [Planning(pipeline, 0).pass_count for pipeline in endless]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else None


def input_stream(label: str, data: object) -> Stream:
    """Return an input as a stream. A map-style data set is read as by `hr.from_map`."""
    if isinstance(data, Operators):
        return data._as_stream()
    is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if is_map and _NO_MAPS.isdisjoint(kind.__name__ for kind in type(data).__mro__):
        return from_map(data)
    needed = "a stream, or a data set with __len__ and __getitem__; hr.from_iterable(…) reads other iterables"
    raise check.invalid(label, data, needed)


def check_input(label: str, pipeline: Pipeline, call: str) -> None:
    """Check that a stream can be one of several inputs."""
    if (advice := pipeline.without_numbers) is not None:
        raise refusal("numbers", call, pipeline.source.name, of=label, remedy=advice)
    if not pipeline.source.keeps_numbers:
        remedy = "put .shuffle() after .pack()"
        raise refusal("lasting numbers", call, ".pack() of shuffled documents", of=label, remedy=remedy)
    if pipeline.group is not None or pipeline.is_batched:
        raise refusal("single samples", call, ".batch()", of=label)
    if pipeline.of_all is not None:
        raise refusal("global batches", call, f".{pipeline.of_all}", of=label)
    if not pipeline.keeps_count:
        raise refusal("known number", call, f".{pipeline.changing[0]}", of=label)
    split_steps(pipeline.steps, label, call)


def streams_of(name: str, inputs: Sequence[object]) -> list[Stream]:
    return [input_stream(f"input {number} of .{name}()", one) for number, one in enumerate(inputs)]


def check_apart(streams: Sequence[Stream], call: str) -> None:
    """Raise OptionError if two inputs are branches of one fork."""
    within = [_forks_within(stream) for stream in streams]
    forks = Counter(fork for some in within for fork in some)
    fork = next((fork for fork, count in forks.items() if count > 1), None)
    if fork is not None:
        same = [str(k) for k, some in enumerate(within) if fork in some]
        raise refusal("separate inputs", call, "branches of one .fork()", of=f"inputs {' and '.join(same)}")


def forks_of(stream: Stream) -> list[str]:
    return [operator.fork for operator in stream.operators if operator.fork is not None]


def _forks_within(stream: Stream) -> set[str]:
    """Return the forks of a stream and of its inputs."""
    return set(forks_of(stream)).union(*(_forks_within(one) for _, one in stream.pipeline().source.inputs))


def check_objects(spec: CombinedSpec) -> None:
    """Check that one reader can read the objects of all inputs."""
    files = [one for source in spec.sources for one in source.objects]
    if any(one.storage_options != files[0].storage_options for one in files):
        raise check.conflict(f"{spec.call}: hr.files() with storage_options=", "others", "give all the same ones")


def combined(spec: CombinedSpec) -> Stream:
    """Return the stream of several checked inputs."""
    check_objects(spec)
    by_url = _numbers_by_url(spec)
    later = [split_steps(pipeline.narrowed_steps)[1] for pipeline in spec.pipelines]
    is_done = not any(later)
    source: AsyncDataset = CombinedDataset(spec, is_done=is_done) if by_url is None else CombinedShards(spec)
    if is_done and (by_url is None or not spec.adds_names):
        return Stream(source)
    random = any(step.random for steps in later for step in steps)
    steps = [[(step.told, step.fn) for step in some] for some in later]
    each = CombinedStep(spec.labels, spec.names if spec.adds_names else None, steps, by_url)
    return Stream(source, (EachSample(Step(spec.kind, "map", each, random, is_implied=True), names_source=is_done),))


def _numbers_by_url(spec: CombinedSpec) -> dict[str, int] | None:
    """Map the URL of each shard to its input. None: not all inputs can be read by ranges."""
    shards = []
    for pipeline in spec.pipelines:
        source = pipeline.source
        if not source.traits.sharded or source.is_compressed or pipeline.is_by_number:
            return None
        if split_steps(pipeline.steps)[0]:
            return None
        shards.append(source.data)
    if any(one.limits != shards[0].limits or one.storage_options != shards[0].storage_options for one in shards):
        return None
    numbers: dict[str, int] = {}
    for number, one in enumerate(shards):
        for url in one.urls:
            if numbers.setdefault(url, number) != number or numbers.setdefault(masked(url), number) != number:
                return None
    return numbers


class InPlace:
    """Positions of a source whose samples do not depend on the seed or the epoch."""

    def __init__(self, source: SampleSource) -> None:
        self._orders = source.orders((), 0)
        self._order = self._orders.order(0, 0)

    def number(self, key: SupportsIndex) -> int:
        """Return the number of the sample at a position. Negative positions count from the end."""
        try:
            position = range(self._order.count)[key]
        except IndexError:
            raise IndexError(f"there is no sample {key}: there are {self._order.count}") from None
        return int(self._orders.numbers(self._order, np.array([position]))[0])


class InputsDataset(AsyncDataset):
    def __init__(self, spec: CombinedSpec) -> None:
        self.spec = spec
        self._first_steps = [split_steps(pipeline.steps)[0] for pipeline in spec.pipelines]
        self._keys: list[Sequence[object] | None] = [None] * len(spec.names)

    def __sample_source__(self) -> SampleSource:
        return CombinedKeySource(self)

    @functools.cached_property
    def in_place(self) -> InPlace:
        return InPlace(self.__sample_source__())

    @property
    def starts(self) -> Ints:
        raise NotImplementedError

    def with_spec(self, spec: CombinedSpec) -> InputsDataset:
        """Return the data set of the same inputs in another order."""
        raise NotImplementedError

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        """Options for single objects. Shards with other options have their own readers."""
        sources = self.spec.sources
        objects = (one for source in sources for one in source.objects)
        return next((one.storage_options for one in (*objects, *sources) if one.has_store), None)

    def _keys_of(self, number: int) -> Sequence[object] | None:
        """Return the keys of an input. None: they are its numbers."""
        source = self.spec.sources[number]
        if not (source.traits.sharded or source.traits.by_number) and self._keys[number] is None:
            self._keys[number] = source.data.keys()
        return self._keys[number]

    @functools.cached_property
    def each_many(self) -> list[ReadsMany | None]:
        both = zip(self.spec.sources, self.spec.pipelines, self._first_steps, strict=True)
        return [None if steps else source.many(pipeline.wanted) for source, pipeline, steps in both]

    async def get_many(self, keys: Sequence[int]) -> Sequence[object]:
        """Return several samples, see `SampleSource.many`."""
        raise NotImplementedError

    async def got_many(self, number: int, at: Sequence[int]) -> Sequence[object]:
        many, keys = self.each_many[number], self._keys_of(number)
        assert many is not None
        return await many(at if keys is None else [keys[k] for k in at])

    async def got(self, number: int, at: int) -> object:
        """Read sample `at` of input `number`, through the leading coroutine functions."""
        source, text = self.spec.sources[number], self.spec.labels[number]
        inside: object = at
        try:
            if (keys := self._keys_of(number)) is not None:
                inside = keys[at]
                text += f", key {inside!r:.200}"
            sample = await source.at(inside, self.spec.pipelines[number].wanted)
            return await through_first(self._first_steps[number], sample)
        except Exception as error:
            error.add_note(text)
            raise

    async def aopen(self) -> None:
        async with AsyncExitStack() as opened:
            for opens in _opens(self.spec.sources):
                await opens.aopen()
                opened.push_async_callback(opens.aclose)
            opened.pop_all()

    async def aclose(self) -> None:
        async with AsyncExitStack() as opened:
            for opens in _opens(self.spec.sources):
                opened.push_async_callback(opens.aclose)


class CombinedDataset(InputsDataset):
    """Samples of several inputs, numbered in sequence.

    Unless `is_done`, which means that no steps follow in workers, each sample is paired with its input's number.
    """

    def __init__(self, spec: CombinedSpec, *, is_done: bool) -> None:
        super().__init__(spec)
        self._is_done = is_done

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(CombinedDataset, is_done=self._is_done), (self.spec,)

    def with_spec(self, spec: CombinedSpec) -> CombinedDataset:
        return CombinedDataset(spec, is_done=self._is_done)

    def __len__(self) -> int:
        return self._firsts[-1]

    @functools.cached_property
    def starts(self) -> Ints:
        """First sample number of each shard, then the total. An input without shards counts as one."""
        starts = [source.starts for source in self.spec.sources]
        firsts = np.cumsum([0, *(each[-1] for each in starts)])
        parts = [first + each[:-1] for first, each in zip(firsts.tolist(), starts, strict=False)]
        return np.concatenate([*parts, firsts[-1:]])

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0, *np.cumsum([int(source.starts[-1]) for source in self.spec.sources]).tolist()]

    async def aget(self, key: int) -> object:
        key = range(len(self))[key]
        number = bisect.bisect_right(self._firsts, key) - 1
        return self._with_input(number, await self.got(number, key - self._firsts[number]))

    async def get_many(self, keys: Sequence[int]) -> Sequence[object]:
        samples, inputs = list[object](keys), [bisect.bisect_right(self._firsts, key) - 1 for key in keys]
        numbers = sorted(set(inputs))

        async def of_input(k: int) -> None:
            number = numbers[k]
            places = [place for place, one in enumerate(inputs) if one == number]
            at = [keys[place] - self._firsts[number] for place in places]
            for place, sample in zip(places, await self.got_many(number, at), strict=True):
                samples[place] = self._with_input(number, sample)

        await for_each(len(numbers), of_input)
        return samples

    def _with_input(self, number: int, sample: object) -> object:
        if not self._is_done:
            return number, sample
        return with_source(sample, self.spec.names[number]) if self.spec.adds_names else sample


class CombinedShards(IndexedShards):
    """The shards of several inputs as one set, read by ranges."""

    def __init__(self, spec: CombinedSpec) -> None:
        shards: list[IndexedShards] = [source.data for source in spec.sources]
        urls = tuple(url for source in shards for url in source.urls)
        index = Index(urls, JoinedFiles([source.index for source in shards]), shards[0].limits, TAR)
        # Members stay raw here: each input decodes its own.
        super().__init__(urls, index, shards[0].storage_options, shards[0].limits, TAR)
        self._readers = OwnReaders(self.storage_options, self.aclose)
        self.spec = spec
        self._firsts = [0, *np.cumsum([len(source.urls) for source in shards]).tolist()]

    def __sample_source__(self) -> SampleSource:
        return CombinedShardSource(self)

    def __reduce__(self) -> tuple[object, ...]:
        return CombinedShards, (self.spec,)

    def with_spec(self, spec: CombinedSpec) -> CombinedShards:
        return CombinedShards(spec)

    @functools.cached_property
    def in_place(self) -> InPlace:
        return InPlace(self.__sample_source__())

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        source, first = self._source_of(ordinal)
        return await source.members(ordinal - first, chosen, self._wanted(ordinal) if wanted is None else wanted)

    async def _of_block(
        self, ordinal: int, shard: ShardIndex, chosen: Ints, wanted: Wanted | None
    ) -> list[dict[str, object]]:
        source, first = self._source_of(ordinal)
        wanted = self._wanted(ordinal) if wanted is None else wanted
        return await source._of_block(ordinal - first, shard, chosen, wanted)

    def format_of(self, ordinal: int) -> Format:
        return self._source_of(ordinal)[0].format

    def _source_of(self, ordinal: int) -> tuple[IndexedShards, int]:
        """Return the input of a shard, which knows the sample ranges, and the input's first shard."""
        number = bisect.bisect_right(self._firsts, ordinal) - 1
        source: IndexedShards = self.spec.sources[number].data
        return source, self._firsts[number]

    async def aclose(self) -> None:
        async with AsyncExitStack() as opened:
            for opens in _opens(self.spec.sources):
                opened.push_async_callback(opens.aclose)
            await super().aclose()

    def _wanted(self, ordinal: int) -> Wanted | None:
        return self.spec.pipelines[bisect.bisect_right(self._firsts, ordinal) - 1].wanted


class CombinedStep:
    """Applies to each sample the steps of its input.

    Args:
        names: Names of the inputs to add to samples. None: none are added.
        by_url: Input number by URL of a shard. None: samples are paired with the number.
    """

    def __init__(
        self,
        labels: Sequence[str],
        names: Sequence[str] | None,
        steps: Sequence[NamedSteps],
        by_url: dict[str, int] | None,
    ) -> None:
        self.labels, self.names = tuple(labels), None if names is None else tuple(names)
        self.steps, self.by_url = tuple(map(tuple, steps)), by_url

    def __call__(self, sample: Any) -> object:
        if self.by_url is None:
            number, sample = sample
        else:
            number = self.by_url[sample["__url__"]]
        sample = through(self.steps[number], sample, f"{self.labels[number]}; ")
        return sample if self.names is None else with_source(sample, self.names[number])


def _opens(sources: Sequence[SampleSource]) -> list[Opens]:
    """Return the resources to open, once for each data set."""
    by_data = {id(source.data): source.opens for source in sources}
    return [opens for opens in by_data.values() if opens is not None]


class CombinedSource(SampleSource):
    data: InputsDataset | CombinedShards
    text = forwarded("data.spec")
    is_endless = forwarded("data.spec")
    is_in_order = forwarded("data.spec")
    is_steady = forwarded("data.spec")
    is_paired = forwarded("data.spec")
    check_order = forwarded("data.spec")
    has_store = True
    answers_keys = False

    @property
    def _spec(self) -> CombinedSpec:
        return self.data.spec

    @property
    def objects(self) -> Sequence[SampleSource]:
        return [one for source in self._spec.sources for one in source.objects]

    @property
    def inputs(self) -> Sequence[tuple[str, Stream]]:
        return list(zip(self._spec.names, self._spec.streams, strict=True))

    @property
    def has_count(self) -> bool:
        return all(source.has_count for source in self._spec.sources)

    @property
    def drawn_by_tokens(self) -> tuple[Any, TokenMixing] | None:
        drawn = self._spec.drawn_by_tokens
        return None if drawn is None else (self.data.with_spec(drawn[0]), drawn[1])

    def count(self) -> int:
        return self._spec.count

    def keys(self) -> Sequence[Any]:
        return super().keys() if self._is_by_own_number else range(self.count())

    async def aget(self, key: Any, wanted: Wanted | None = None) -> object:
        return await self.at(self.number(key), wanted)

    def number(self, key: Any) -> object:
        if self._is_by_own_number:
            return key
        if not self.is_steady:
            raise TypeError(
                f"{self.text} gives no sample by its number: its inputs come in other orders in other epochs; "
                "shuffle or draw what comes of them, and not the inputs"
            )
        return self.data.in_place.number(key)

    @property
    def _is_by_own_number(self) -> bool:
        return self._spec.has_own_numbers or self._spec.is_in_order

    def can_permute(self, by: str) -> bool:
        return self._spec.can_permute("global" if by == "auto" and not self.traits.sharded else by)

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> CombinedOrders:
        assert not keeps, "no index is asked for keys of several inputs"
        return CombinedOrders(self, self._spec, seed)


class CombinedKeySource(CombinedSource, KeySource):
    traits = Traits(numbered=True, by_number=True)
    data: InputsDataset
    storage_options = forwarded("data")
    starts = forwarded("data")

    async def at(self, key: Any, wanted: Wanted | None) -> object:
        return await self.data.aget(key)

    def many(self, wanted: Wanted | None) -> ReadsMany | None:
        return None if None in self.data.each_many else self.data.get_many


class CombinedShardSource(CombinedSource, IndexedShardSource):
    data: CombinedShards

    async def at(self, key: Any, wanted: Wanted | None) -> object:
        return await self.data.aget(key, wanted)

    @property
    def starts(self) -> Ints:
        len(self.data)
        return self.data.index.starts

    @property
    def blocks(self) -> Ints | None:
        return self.data.blocks if self.is_in_order else None  # otherwise blocks are not read sequentially

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:
        return True


class CombinedOrders(SourceOrders):
    """The combined orders of several inputs."""

    def __init__(self, source: SampleSource, spec: CombinedSpec, seed: int) -> None:
        super().__init__(source, ())
        seeds = [spec.seed_of(seed, number) for number in range(len(spec.names))]
        self._spec, self._plannings, self._seed = spec, list(map(Planning, spec.pipelines, seeds)), seed
        counts = [len(one.starts) - 1 for one in spec.sources]
        self._first_shards = np.cumsum([0, *counts])[:-1].tolist()

    @property
    def count(self) -> int:
        return self._spec.count

    @cached_property
    def sizes(self) -> Ints:
        return np.concatenate([planning.sizes for planning in self._plannings])

    def order(self, epoch: int, number: int) -> Order:
        inputs = [self._input(planning, epoch, number * _PASSES) for planning in self._plannings]
        for label, (_, has), count in zip(self._spec.labels, inputs, self._spec.sizes, strict=True):
            if has != count:
                raise check.unequal(f"{label} in epoch {epoch}", f"{has} samples", "its first one", count)
        key = self._seed, epoch, number
        return self._spec.arrange([order for order, _ in inputs], key, self._first_shards, self._window)

    def _input(self, planning: Planning, epoch: int, first: int) -> tuple[Order, int]:
        """Return the order of an input, and its samples until it repeats or ends."""
        if not self._spec.begins_again:
            order = planning.passes(epoch, first)
            return _Located(planning, order), order.count
        passes = Passes(partial(self._pass, planning, epoch, first), None)
        return passes, passes.pass_count

    @staticmethod
    def _pass(planning: Planning, epoch: int, first: int, turn: int) -> Order:
        return _Located(planning, planning.one_pass(epoch, first + turn))

    @property
    def full_count(self) -> int | None:
        return self._spec.full_count

    def described(self) -> list[str]:
        described = [self._spec.described()]
        for name, planning in zip(self._spec.names, self._plannings, strict=True):
            described += [f"{name}: {line}" for line in planning.described()]
        return described

    @property
    def fingerprint(self) -> str:
        described = [
            f"{name}={planning.fingerprint}" for name, planning in zip(self._spec.names, self._plannings, strict=True)
        ]
        return hashlib.blake2b("\n".join(described).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    @property
    def window_bytes(self) -> int:
        """Approximate size of a window of samples that is read before any of them is used.

        For inputs that alternate, it is the sum of one window of each. So an input's share of a window is about one of
        its own windows, whose samples are stored close together.
        """
        if self._source.sample_bytes is None:
            return 0
        sequential = (min(_WINDOW_SAMPLES * nbytes, _WINDOW_BYTES) for nbytes in self._bytes_of_samples)
        windows = (planning.window_bytes for planning in self._plannings)
        each = [window or some for window, some in zip(windows, sequential, strict=True)]
        return int(max(each) if self._spec.is_in_turn else sum(each))

    @property
    def _window(self) -> int:
        if self._source.sample_bytes is None:
            return _WINDOW_SAMPLES
        each, counts = self._bytes_of_samples, self._spec.shares
        mean = max(each)
        if counts is not None and any(counts):
            mean = sum(some * nbytes for some, nbytes in zip(counts, each, strict=True)) / sum(counts)
        return max(1, int(self.window_bytes / max(1.0, mean)))

    @property
    def _bytes_of_samples(self) -> list[float]:
        return [source.sample_bytes for source in self._spec.sources if source.sample_bytes is not None]


class _Located:
    """An input's order, located in the input's own shards."""

    def __init__(self, planning: Planning, order: Order) -> None:
        self._planning, self._order = planning, order
        self.count, self.lanes, self.window_end = order.count, order.lanes, order.window_end

    def locate(self, positions: Ints) -> Places:
        return self._planning.locate(self._order, positions)
