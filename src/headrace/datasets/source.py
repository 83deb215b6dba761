"""What streams' samples come from: the one face that pipelines, plans and the engine see of any kind of data.

A data set gives its own by `__sample_source__()`. Nobody asks what kind it is: it says what it can do, and does it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.faces import Described, HasKeys, IteratedData, KeyedData, Parts
from headrace.datasets.fingerprints import fingerprint_of
from headrace.datasets.ordering import Ordering
from headrace.datasets.sharing import RanksBy
from headrace.errors import masked
from headrace.plan import Order, Places, ShardOrder
from headrace.plan.token_mixing import TokenMixing
from headrace.producer import Producer
from headrace.producers.members import Members
from headrace.producers.shard_plan import Expected
from headrace.producers.unpack import Unpacks
from headrace.protocols import Opens
from headrace.rows import Scanner
from headrace.types import Ints

KeepsKey = Callable[[str], object]
"""Says of a sample's key whether it is wanted."""

Wanted = tuple[frozenset[str], ...]
"""Of each of these sets of fields at least one is wanted, if a sample has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a source can do.

    Attributes:
        numbered: its samples have keys and a number, and each can be got by itself.
        sharded: its samples lie in shards, which can be read as they lie.
        iterated: an iterator gives its samples, in an order of its own, and may begin again by itself.
        objects: each sample is an object in a store, read with the loader's own storage options.
        by_number: its samples are asked for by their numbers, as those of shards are, and not by keys of their own.
    """

    numbered: bool = False
    sharded: bool = False
    iterated: bool = False
    objects: bool = False
    by_number: bool = False

    @property
    def indexed(self) -> bool:
        """Whether it has shards with an index."""
        return self.numbered and self.sharded


class EpochIO(Protocol):
    """What the engine offers a source in one epoch: the ways to get samples, of which it takes one.

    Attributes:
        is_planned: whether the order of the epoch's samples is known by their numbers.
        is_by_number: whether they are wanted one by one.
        wanted: which of their fields are wanted; None: all.
    """

    @property
    def is_planned(self) -> bool: ...

    @property
    def is_by_number(self) -> bool: ...

    @property
    def wanted(self) -> Wanted | None: ...

    def keys(
        self,
        data: KeyedData,
        get: Callable[[Any], Awaitable[object]],
        many: Callable[[Sequence[Any]], Awaitable[Sequence[object]]] | None,
    ) -> Producer:
        """One by one, or some at once, by the keys of `data`."""
        ...

    def ranges(self, members: Callable[[int, Ints], Awaitable[Members]]) -> Producer:
        """Shard by shard, where it is known where samples lie there."""
        ...

    def shards(
        self,
        scanner: Callable[[str], Scanner],
        unpacks: Callable[[str], Unpacks | None],
        expected: Callable[[int], Awaitable[Expected]] | None,
    ) -> Producer:
        """Shards as they lie.

        Args:
            scanner: finds the samples of the shard at an address.
            unpacks: decompresses it; None where it is not compressed.
            expected: what an index says of the shard with a number; None: there is none.
        """
        ...

    def iterated(self, data: IteratedData) -> Producer:
        """As an iterator gives them."""
        ...


class SampleSource(ABC):
    """A data set of any kind.

    Attributes:
        data: the data set itself.
        traits: what it can do.
        urls, storage_options: the addresses of its shards or objects, and what their store is told.
        is_compressed: whether any of its shards can be read from its start only.
        blocks: where samples share blocks that are read as a whole, the number of each one's first sample, and of all
            samples last.
        is_endless: whether it has no end.
        ranks_by: how ranks divide what an iterator gives.
        why_no_state: why states of it are refused; None: they are not, or it shows when one is asked for.
    """

    traits: ClassVar[Traits]
    why_no_state: str | None = None

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def urls(self) -> Sequence[str]:
        return ()

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What `describe` says of it: (of what, what), without a request."""
        return []

    @property
    def inputs(self) -> Sequence[tuple[str, Described]]:
        """The streams that it is of, by their names, where it is of several."""
        return ()

    @property
    def is_in_order(self) -> bool:
        """Whether its samples come one after the other as they lie, where no operator says otherwise."""
        return True

    @property
    def is_steady(self) -> bool:
        """Whether the same samples come at the same positions in all epochs, where no operator says otherwise."""
        return True

    @property
    def answers_keys(self) -> bool:
        """Whether an index says of samples' keys which are wanted: nothing is read of the others then."""
        return self.traits.indexed

    @property
    def has_count(self) -> bool:
        """Whether it is known without a request how many samples it has."""
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
    def is_endless(self) -> bool:
        return False

    @property
    def has_store(self) -> bool:
        """Whether it has a store of its own to read from."""
        return bool(self.urls)

    @property
    def objects(self) -> Sequence[SampleSource]:
        """Itself, if its samples are objects that the loader's own reader reads; of several inputs those that are."""
        return [self] if self.traits.objects else []

    @property
    def sample_bytes(self) -> float | None:
        """The mean size of a sample, where samples are read in ranges; None: they are not."""
        return None

    @property
    def name(self) -> str:
        """What states and errors call it."""
        return type(self.data).__name__

    @property
    def text(self) -> str:
        """How it is shown."""
        return f"{self.name}(…)"

    @property
    def ranks_by(self) -> RanksBy | None:
        return None

    @property
    def opens(self) -> Opens | None:
        """What is opened and closed on the engine's loop, if anything is."""
        return None

    @property
    def keeps_numbers(self) -> bool:
        """Whether a number is that of the same sample in each epoch, where samples have numbers."""
        return True

    @property
    def draws(self) -> bool:
        """Whether it decides itself in each pass which of its samples come."""
        return False

    @property
    def drawn_by_tokens(self) -> tuple[Any, TokenMixing] | None:
        """Of a mixture by tokens: (the data set as lanes draw on it, how they do); None: it is none."""
        return None

    @property
    def has_lengths(self) -> bool:
        """Whether it is known of each sample how many tokens it has, before it is read."""
        return False

    def lengths(self) -> Ints:
        """How many tokens each sample has."""
        raise TypeError(f"{self.name} does not know how long its samples are before they are read")

    @property
    def parts(self) -> Parts | None:
        """What gets parts of samples, without the rest of these; None: there is nothing that does."""
        return None

    @property
    def without_numbers(self) -> str | None:
        """What to do about it that samples cannot be read one by one, by their numbers; None: they can."""
        return None if self.traits.numbered else "shards need an index for that (headrace index URL…)"

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:  # noqa: ARG002
        """Whether its samples have numbers before they are read.

        Args:
            by_number: they are wanted one by one.
            by_key: some are left out by their keys.
        """
        return False

    def divides(self) -> bool:
        """Whether several ranks can share its samples by their numbers."""
        return self.has_numbers(by_number=False, by_key=False)

    def count(self) -> int:
        """How many samples it has; TypeError where nobody knows."""
        raise TypeError(f"{self.name} has no length: its samples are counted while they are read")

    def keys(self) -> Sequence[object]:
        """The keys of the samples."""
        raise TypeError(f"{self.name} has no keys; shards need an index for that")

    async def aget(self, key: object) -> object:  # noqa: ARG002
        """The sample with this key."""
        raise TypeError(f"{self.name} gives no sample by its number: shards need an index")

    async def aget_wanted(self, key: object, wanted: Wanted | None) -> object:  # noqa: ARG002 (shards go by it)
        """The same; of its fields those that are not wanted may be missing."""
        return await self.aget(key)

    async def at(self, key: object, wanted: Wanted | None) -> object:
        """The sample that its orders give this number, or the key that has it; see `aget`."""
        return await self.aget_wanted(key, wanted)

    def passing(self, keeps: tuple[KeepsKey, ...]) -> Ints | None:  # noqa: ARG002
        """The numbers of the samples whose keys are wanted; None: all."""
        return None

    def fingerprint(self) -> str:
        """What tells its data from other data, as far as it is known before they are read."""
        return fingerprint_of(self.urls if self.traits.sharded else (self.name,))

    def fingerprint_with(self, sizes: Ints) -> str:
        """The same, where it is known how many of its samples each shard has that are wanted."""
        return fingerprint_of(self.urls, sizes)

    def at_revision(self, fingerprint: str) -> str:
        """The same with the revision at which its data were listed, where they have one: states are of that, too."""
        revision = getattr(self.urls, "revision", "")
        return f"{fingerprint} at {masked(revision)}" if revision else fingerprint

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:  # noqa: ARG002
        """The orders in which it gives its samples, where these have numbers.

        Args:
            keeps: which of them are wanted.
            seed: of what it draws.
        """
        return SourceOrders(self, keeps)

    @property
    def starts(self) -> Ints:
        """The number of each shard's first sample, and of all samples last; what has no shards is one."""
        return np.array([0, self.count()])

    def check_order(self, order: Ordering) -> None:  # noqa: B027 (most come in any order)
        """Raise OptionError where it cannot come in such an order."""

    @abstractmethod
    def open(self, io: EpochIO) -> Producer:
        """The samples of one epoch."""


class SourceOrders:
    """The orders in which a source gives its samples, before any operator: one after the other, in each pass.

    Args:
        source: its samples have numbers.
        keeps: says of their keys which are wanted.
    """

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
        """How many samples each shard has, of those that are wanted; a source without shards is one."""
        starts, passing = self._starts, self._passing
        return np.diff(starts if passing is None else np.searchsorted(passing, starts))

    @property
    def count(self) -> int:
        """How many samples a pass has."""
        return int(self.sizes.sum())

    @property
    def full_count(self) -> int | None:
        """How many come until each has come, where a pass has no end; None: nobody knows."""
        return self.count

    @property
    def fingerprint(self) -> str:
        """What tells these data from other data: their shards' names and sizes, or how many samples there are."""
        return self._source.fingerprint_with(self.sizes)

    @property
    def window_bytes(self) -> int:
        """About how many bytes the samples of a window have that is read before any of it is used."""
        return 0

    def order(self, epoch: int, number: int) -> Order:  # noqa: ARG002
        """Which samples come in one pass of an epoch."""
        return ShardOrder(self.sizes, "none", ())

    def described(self) -> list[str]:
        """What makes it, as a state names it."""
        return []

    def keys(self, keys: Sequence[object]) -> HasKeys:
        """What is asked for by the numbers that it gives, where the source's samples have these keys."""
        return keys

    def locate(self, order: Order, positions: Ints) -> Places:
        """Where the samples at some positions lie in the source."""
        shards, rows = order.locate(positions)
        if self._passing is not None:
            starts = np.concatenate([[0], np.cumsum(self.sizes)])
            rows = self._passing[starts[shards] + rows] - self._starts[shards]
        return Places(shards, rows)

    def work(self, numbers: Ints, power: int) -> NDArray[np.float64]:
        """The work that samples with these numbers are: their documents' lengths, each to this power."""
        return self._source.lengths()[numbers].astype(np.float64) ** power

    def numbers(self, order: Order, positions: Ints) -> Ints:
        """The numbers of the samples at some positions."""
        shards, rows = self.locate(order, positions)
        return np.asarray(self._starts[shards] + rows, np.int64)
