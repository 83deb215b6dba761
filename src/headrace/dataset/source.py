"""The interface that pipelines, order planning and the engine use for any kind of data.

A data set returns its `SampleSource` from `__sample_source__()`. Callers check its traits, never its class.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Opens
from headrace.errors import masked
from headrace.order.orders import Order, Places, ShardOrder
from headrace.types import Ints

if TYPE_CHECKING:
    from headrace.dataset.asynchronous import RanksBy
    from headrace.dataset.stream import Stream
    from headrace.engine.open_readers import EpochIO
    from headrace.order.combined import TokenMixing
    from headrace.pipeline.pipeline import Ordering
    from headrace.readers.protocol import Producer

KeepsKey = Callable[[str], object]
"""True for the keys of samples to keep."""

Wanted = tuple[frozenset[str], ...]
"""Sets of alternative field names. Of each set, at least one field that the sample has is needed."""


Parts = Callable[[Ints, Ints, Ints], Awaitable[Sequence[object]]]
"""Reads tokens [starts[i], stops[i]) of sample numbers[i], in the form of whole samples."""


ReadsMany = Callable[[Sequence[Any]], Awaitable[Sequence[object]]]
"""Reads samples, and draws no random numbers. After an error each is read alone."""


class HasKeys(Protocol):
    def __getitem__(self, number: int, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Capabilities of a source.

    Attributes:
        numbered: Samples have keys and numbers, and can be fetched one by one.
        sharded: Samples are stored in shards, which can be read sequentially.
        iterated: Samples come from an iterator, in its own order. The iterator may repeat.
        objects: Each sample is an object in a store, read with the loader's storage options.
        by_number: Samples are fetched by number, as those of shards are, and not by keys of their own.
    """

    numbered: bool = False
    sharded: bool = False
    iterated: bool = False
    objects: bool = False
    by_number: bool = False

    @property
    def indexed(self) -> bool:
        return self.numbered and self.sharded


class SampleSource(ABC):
    """A data set of any kind.

    Attributes:
        data: The data set itself.
        traits: Its capabilities.
        urls: URLs of its shards or objects.
        storage_options: Options of their store.
        is_compressed: True if some shard can be read from its start only.
        blocks: If samples share blocks that are read as a whole: the first sample number of each block, then the total.
        is_endless: True if it has no end.
        is_in_order: True if samples keep their stored order, unless an operator changes it.
        is_steady: True if positions mean the same samples in all epochs, unless an operator changes it.
        is_paired: True if a number names several samples, so that there may be many more numbers than positions.
        keeps_numbers: True if a number means the same sample in each epoch. Only for samples with numbers.
        ranks_by: How ranks divide the samples of an iterator.
        why_no_state: Why states are refused. None: not known to be refused before one is requested.
        makes_batches: True if its samples are batches.
    """

    traits: ClassVar[Traits]
    is_endless: bool = False
    is_in_order: bool = True
    is_steady: bool = True
    is_paired: bool = False
    keeps_numbers: bool = True
    ranks_by: RanksBy | None = None
    why_no_state: str | None = None
    makes_batches: bool = False

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def urls(self) -> Sequence[str]:
        return ()

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Label and text of each line of `describe`. Makes no request."""
        return []

    @property
    def inputs(self) -> Sequence[tuple[str, Stream]]:
        """Input streams with their names, if the source combines several."""
        return ()

    @property
    def answers_keys(self) -> bool:
        """True if an index knows the keys, so that samples filtered by key are not read."""
        return self.traits.indexed

    @property
    def has_count(self) -> bool:
        """True if the number of samples is known without a request."""
        return self.traits.numbered

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        return None

    @property
    def is_compressed(self) -> bool:
        return False

    @property
    def blocks(self) -> Ints | None:
        return None

    @property
    def has_store(self) -> bool:
        """True if the source reads from a store of its own."""
        return bool(self.urls)

    @property
    def objects(self) -> Sequence[SampleSource]:
        """Sources, including inputs, whose samples are objects that the loader's own reader reads."""
        return [self] if self.traits.objects else []

    @property
    def sample_bytes(self) -> float | None:
        """Mean size of a sample read by ranges. None for other sources."""
        return None

    @property
    def name(self) -> str:
        return type(self.data).__name__

    @property
    def text(self) -> str:
        return f"{self.name}(…)"

    @property
    def opens(self) -> Opens | None:
        """Resource to open and close on the engine's loop, if any."""
        return None

    @property
    def drawn_by_tokens(self) -> tuple[Any, TokenMixing] | None:
        """Data set and token shares of a mixture by tokens. None for other sources."""
        return None

    @property
    def has_lengths(self) -> bool:
        """True if the token count of each sample is known before it is read."""
        return False

    def lengths(self) -> Ints:
        raise TypeError(f"{self.name} does not know how long its samples are before they are read")

    @property
    def parts(self) -> Parts | None:
        """Function that reads token ranges of samples. None: not supported."""
        return None

    @property
    def without_numbers(self) -> str | None:
        """Advice for errors if samples cannot be read by number. None: they can."""
        return None if self.traits.numbered else "shards need an index for that (headrace index URL…)"

    @property
    def only_in_order(self) -> str | None:
        """Advice for errors if samples can be read in ascending order of their numbers only. None: in any order."""
        advice = (stream.pipeline().source.only_in_order for _, stream in self.inputs)
        return next((why for why in advice if why is not None), None)

    def indexed(self) -> Stream | None:
        """Return the stream of the same samples with an index, made if missing. None: no index can be made."""
        return None

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:
        """True if samples have numbers before they are read.

        Args:
            by_number: Samples are fetched one by one.
            by_key: Samples are filtered by key.
        """
        return False

    def divides(self) -> bool:
        """True if several ranks can share the samples by number."""
        return self.has_numbers(by_number=False, by_key=False)

    def count(self) -> int:
        """Return the number of samples. Raises TypeError if it is not known."""
        raise TypeError(f"{self.name} has no length: its samples are counted while they are read")

    def keys(self) -> Sequence[object]:
        raise TypeError(f"{self.name} has no keys; shards need an index for that")

    def number(self, key: object) -> object:
        """Return the number, or own key, of the sample with a key of the data set."""
        return key

    async def aget(self, key: object, wanted: Wanted | None = None) -> object:
        """Return the sample with a key. Fields that are not wanted may be missing."""
        raise TypeError(f"{self.name} gives no sample by its number: shards need an index")

    async def at(self, key: object, wanted: Wanted | None) -> object:
        """Return the sample with a number of the source's orders, or with its key; see `aget`."""
        return await self.aget(key, wanted)

    def many(self, wanted: Wanted | None) -> ReadsMany | None:
        """Function that reads several samples faster than `at`. None: there is none."""
        return None

    def passing(self, keeps: tuple[KeepsKey, ...]) -> Ints | None:
        """Return the numbers of the samples whose keys pass the filters. None: all."""
        return None

    def fingerprint(self) -> str:
        """Return an identifier of the data, from what is known before samples are read."""
        return fingerprint_of(self.urls if self.traits.sharded else (self.name,))

    def fingerprint_with(self, sizes: Ints) -> str:
        """Return the identifier of the data, given the number of wanted samples in each shard."""
        return fingerprint_of(self.urls, sizes)

    def at_revision(self, fingerprint: str) -> str:
        """Append the revision of the data's listing, if it has one. States depend on it."""
        revision = getattr(self.urls, "revision", "")
        return f"{fingerprint} at {masked(revision)}" if revision else fingerprint

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:
        """Return the orders of the samples, which have numbers and pass the key filters `keeps`."""
        return SourceOrders(self, keeps)

    @property
    def starts(self) -> Ints:
        """First sample number of each shard, then the total. A source without shards counts as one."""
        return np.array([0, self.count()])

    def can_permute(self, by: str) -> bool:
        """True if a shuffle of this kind can change the order of the source itself."""
        return True

    def check_order(self, order: Ordering) -> None:  # noqa: B027 (most come in any order)
        """Raise OptionError if the source does not support the order."""

    @abstractmethod
    def open(self, io: EpochIO) -> Producer: ...


class _Forwarded:
    def __init__(self, path: str) -> None:
        self._path = path

    def __set_name__(self, owner: type, name: str) -> None:
        self._get = attrgetter(f"{self._path}.{name}")

    def __get__(self, source: object, owner: type) -> Any:
        return self if source is None else self._get(source)


def forwarded(path: str) -> Any:
    """Return an attribute of a source that is the attribute of the same name of the object at `path`."""
    return _Forwarded(path)


class SourceOrders:
    """The orders of a source with numbered samples before any operator: sequential passes."""

    def __init__(self, source: SampleSource, keeps: tuple[KeepsKey, ...]) -> None:
        self._source, self._keeps = source, keeps

    @cached_property
    def _starts(self) -> Ints:
        return self._source.starts

    @cached_property
    def _passing(self) -> Ints | None:
        return self._source.passing(self._keeps)

    @cached_property
    def sizes(self) -> Ints:
        """Number of samples of each shard after key filters. A source without shards counts as one."""
        starts, passing = self._starts, self._passing
        return np.diff(starts if passing is None else np.searchsorted(passing, starts))

    @property
    def count(self) -> int:
        return int(self.sizes.sum())

    @property
    def full_count(self) -> int | None:
        """Samples until each has occurred, where a pass has no end. None: not known."""
        return self.count

    @property
    def fingerprint(self) -> str:
        """Identifier of the data: shard names and sizes, or the number of samples."""
        return self._source.fingerprint_with(self.sizes)

    @property
    def window_bytes(self) -> int:
        """Approximate size of a window of samples that is read before any of them is used."""
        return 0

    def order(self, epoch: int, number: int) -> Order:
        return ShardOrder(self.sizes, "none", ())

    def described(self) -> list[str]:
        """Return the names in a state of what makes the order."""
        return []

    def keys(self, keys: Sequence[object]) -> HasKeys:
        """Return a map from numbers of these orders to `keys`, the keys of the source's samples."""
        return keys

    def locate(self, order: Order, positions: Ints) -> Places:
        shards, rows = order.locate(positions)
        if self._passing is not None:
            starts = np.concatenate([[0], np.cumsum(self.sizes)])
            rows = self._passing[starts[shards] + rows] - self._starts[shards]
        return Places(shards, rows)

    def work(self, numbers: Ints, power: int) -> NDArray[np.float64]:
        """Return the cost of samples: their token counts raised to `power`."""
        return self._source.lengths()[numbers].astype(np.float64) ** power

    def numbers(self, order: Order, positions: Ints) -> Ints:
        shards, rows = self.locate(order, positions)
        return np.asarray(self._starts[shards] + rows, np.int64)


class StoredSource(SampleSource):
    """Shards or objects in a store."""

    @property
    def urls(self) -> Sequence[str]:
        urls: Sequence[str] = self.data.urls
        return urls

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        options: Mapping[str, object] | None = self.data.storage_options
        return options


_CHUNK = 2**14


def fingerprint_of(urls: Sequence[str], sizes: Ints | None = None) -> str:
    """Return a digest of the shards' file names, which ignores their location, and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    source, separator = iter(urls), ""
    while chunk := list(islice(source, _CHUNK)):  # in chunks: there may be millions
        names = separator + "\n".join(url.partition("?")[0].rpartition("/")[2] for url in chunk)
        digest.update(names.encode("utf-8", "surrogateescape"))
        separator = "\n"
    if sizes is not None:
        digest.update(np.ascontiguousarray(sizes, "<i8").tobytes())
    return digest.hexdigest()


T = TypeVar("T")


def blocking(function: Callable[[], Coroutine[object, object, T]]) -> T:
    """Run a coroutine function to its end, even if a loop is running in this thread."""
    result: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(function()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="headrace-blocking")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return result[0]
