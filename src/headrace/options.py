"""Small frozen groups of options, one for each stage; what belongs to one stage only sits here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import ArrayLike

from headrace.errors import OptionError
from headrace.numbers import is_whole
from headrace.types import Ints, Tail

Balance = Literal["tokens", "tokens^2"] | Callable[[Ints], ArrayLike]
"""By what work ranks are to be even: see `headrace.DataLoader`."""

MiB, GiB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How the fetch stage reads.

    Attributes:
        range_bytes: shards are read by requests of this many bytes, and what is longer than two of them by several
            requests at once; a multiple of 512.
        attempts: requests made for one range before its error is raised.
        connect_timeout_s: seconds for a connection to stand.
        first_byte_timeout_s: seconds from the request to the first byte of the body.
        stall_timeout_s: seconds without a byte after which a body is given up and asked for again from there.
        min_rate_bytes_s: a body that comes more slowly than this over 30 seconds is given up and asked for again from
            there; 0: no body is too slow.
        total_timeout_s: seconds for one range with all its attempts.
        backoff_s: the longest wait before the second attempt; it doubles with each one, and the wait is drawn below it.
        backoff_cap_s: the longest wait before any attempt, unless the store asks for a longer one (at most 60 s).
        hedge_share: at most this share of requests may be second ones, made when the first byte is later than 95 % of
            the first bytes from that host are; 0: none are made.
        gap_bytes: ranges of one object that are wanted at the same time are asked for as one where no more bytes than
            this lie between them; 0: only where they touch.
        cache_dir: a folder in which what was read is kept, for all processes of this machine; None: nothing is kept.
        cache_bytes: how many bytes it may hold; of what no loader has open, that which was used longest ago goes first.
        allow_pipe: whether `pipe:` addresses may run their shell commands.
    """

    range_bytes: int = 4 * MiB
    attempts: int = 6
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 15.0
    stall_timeout_s: float = 15.0
    min_rate_bytes_s: int = 1024
    total_timeout_s: float = 60.0
    backoff_s: float = 0.2
    backoff_cap_s: float = 10.0
    hedge_share: float = 0.05
    gap_bytes: int = 16 * 1024
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int = 10 * GiB
    allow_pipe: bool = False

    def __post_init__(self) -> None:
        if self.range_bytes <= 0 or self.range_bytes % 512:
            raise OptionError(f"range_bytes={self.range_bytes} must be a positive multiple of 512")
        if self.attempts < 1:
            raise OptionError(f"attempts={self.attempts} must be 1 or more")
        for name in ("connect_timeout_s", "first_byte_timeout_s", "stall_timeout_s", "total_timeout_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)} must be more than 0 seconds")
        for name in ("backoff_s", "backoff_cap_s", "min_rate_bytes_s", "gap_bytes"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0 <= self.hedge_share <= 1:
            raise OptionError(f"hedge_share={self.hedge_share} must be between 0 and 1")
        if self.cache_bytes < 1:
            raise OptionError(f"cache_bytes={self.cache_bytes} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Exclude:
    """What is left out of a data set whose samples have numbers, and never read; what is left comes in the same order.

    Global batches are filled up with what follows. Any number of ranks leaves out the same, states go on to be good,
    and they say what was left out of their own epoch: that stays left out, whatever this says when they are loaded.

    Attributes:
        samples: the numbers of samples in the data set, before any shuffle: left out of each epoch. Of streams that are
            interleaved or mixed the first one's samples have the first numbers, then the next one's; `quarantine=`
            writes the same ones.
        steps: (first, behind the last) global batches, counted in the epoch's order from 0 as if nothing were left out:
            `[(5000, 5010)]` are ten of them. They are of one epoch.
        epoch: the number of that one.
        files: what a loader has written by its `quarantine=`: samples left out of each epoch.
    """

    samples: Sequence[int] = ()
    steps: Sequence[tuple[int, int]] = ()
    epoch: int = 0
    files: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        if not _are(self.samples, is_whole):
            raise OptionError(f"Exclude(samples={self.samples!r:.200}): a list of numbers is meant, of 0 or more")
        if not _are(self.steps, lambda pair: _are(pair, is_whole) and len(pair) == 2 and pair[0] < pair[1]):
            raise OptionError(f"Exclude(steps={self.steps!r:.200}): a list of pairs is meant: (first, behind the last)")
        if not is_whole(self.epoch):
            raise OptionError(f"Exclude(epoch={self.epoch!r}): the number of an epoch is meant, of 0 or more")
        if _is_path(self.files) or not _are(self.files, _is_path):
            raise OptionError(f"Exclude(files={self.files!r:.200}): a list of files is meant")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SkipPolicy:
    """Which samples that have failed are left out.

    Attributes:
        decide: asked for each with its exception, says True for one that is left out; None: all are.
        in_all: how many may be left out in an epoch; None: any number.
        in_a_row: how many, with none between them that is delivered; None: any number.
    """

    decide: Callable[[BaseException], object] | None
    in_all: int | None
    in_a_row: int | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a loader was told, with every "auto" resolved.

    Attributes:
        batch_size: on each rank; where `global_batch_size` is given, of all ranks together, it follows from that.
        is_single: whether samples are given one by one, and none with another.
        tail: what becomes of a last step that is short; see `headrace.plan.Steps`.
        fetch_concurrency: reads at once; it is begun with `first_reads` of them.
        skips: which failed samples are left out; None: the first of a batch is raised in its place.
        exclude: what is left out of epochs; None: nothing.
        balance: by what work ranks are even; None: each has a stretch of each step.
        quarantine: the file that names the samples that were skipped; None: there is none.
        together: of samples that are given on one by one, how many workers make together at most.
        unchanged: see `headrace.tasks.Chain`.
    """

    batch_size: int
    global_batch_size: int | None = None
    is_single: bool = False
    tail: Tail = "short"
    drop_last: bool
    num_workers: int
    prefetch_factor: int
    collate: Callable[[list[Any]], object] | None
    use_slots: bool
    init: Callable[[int], object] | None
    seed: int
    in_order: bool
    timeout_s: float
    fetch_concurrency: int
    first_reads: int
    memory_budget: int
    fetch: FetchOptions
    skips: SkipPolicy | None = None
    exclude: Exclude | None = None
    balance: Balance | None = None
    quarantine: str | None = None
    pin_memory: bool = False
    device: object = None
    together: int = 1
    unchanged: Callable[[object], bool] | None = None


def _are(values: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether these are some, and each is what is wanted; they are looked through again later, as no iterator is."""
    return hasattr(values, "__iter__") and hasattr(values, "__len__") and all(map(wanted, values))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)
