"""What is read of shards as they lie: how their bytes are got, and which of their samples come in which order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.producers.shuffle_buffer import ShuffleBuffer
from headrace.producers.unpack import Unpacks
from headrace.protocols import Reads, Version
from headrace.rows import Scanner
from headrace.types import Ints, Ranges


@dataclass(frozen=True, slots=True)
class ShuffleWindow:
    """Consecutive samples that are put in another order among themselves; their number depends on the data alone.

    Attributes:
        samples, nbytes: a window ends with the sample that reaches either.
        order: (how many samples, the window's number) to the order in which they are used.
    """

    samples: int
    nbytes: int
    order: Callable[[int, int], Ints]


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """Where shards can be begun again so that the same samples follow.

    Attributes:
        shard: the number of the shard in the order of the plan.
        row: how many of its samples came before.
        window: the number of the window that begins there.
        failures: from there on, the numbers of the samples in whose places shards failed: these have ended windows,
            and samples behind them have the numbers that they have since the rest of those shards did not come.
    """

    shard: int = 0
    row: int = 0
    window: int = 0
    failures: Sequence[int] = ()

    def described(self) -> list[object]:
        """The mark as JSON."""
        token: list[object] = [self.shard, self.row, self.window]
        return [*token, list(self.failures)] if self.failures else token


class Expected(NamedTuple):
    """What is known of a shard whose samples must be looked for.

    Attributes:
        version: of the object.
        samples: how many it has; None: not known.
    """

    version: Version
    samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReading:
    """How shards are read.

    Attributes:
        reader: reads their bytes.
        scanner: makes a scanner for a shard.
        unpacks: makes a decompressor for a shard; None where it is not compressed.
        expected: what an index, or a listing, says of the shard with this number; None: there is neither.
        range_bytes: bytes of one request.
    """

    reader: Reads
    scanner: Callable[[str], Scanner]
    unpacks: Callable[[str], Unpacks | None]
    expected: Callable[[int], Awaitable[Expected]] | None
    range_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Which samples of shards come.

    Attributes:
        shards: their numbers and addresses, in the order of the plan, from the one on that `begin` names.
        window: how samples are shuffled.
        buffer: the same, where they wait in a buffer instead.
        take: how many samples to give at most, with those that are done.
        in_round: how many shards make a round: samples are not exchanged between rounds.
        is_endless: whether rounds come again and again.
        begin: where to begin.
        done: which of the samples from there on are left out.
        stop: (the number of a shard, a row): samples before it come, and none from there on; None: all come.
    """

    shards: Iterable[tuple[int, str]]
    window: ShuffleWindow | None
    buffer: ShuffleBuffer | None
    take: int | None
    in_round: int
    is_endless: bool
    begin: ResumeToken
    done: Ranges
    stop: tuple[int, int] | None = None
