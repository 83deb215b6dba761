"""Frozen groups of options, one per stage."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import ArrayLike

from headrace._util import check
from headrace._util.check import is_whole
from headrace.errors import OptionError
from headrace.types import Ints, Tail

Balance = Literal["tokens", "tokens^2"] | Callable[[Ints], ArrayLike]
"""Measure of work that is balanced among ranks, see `headrace.DataLoader`."""

MiB, GiB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Options of reads.

    Attributes:
        range_bytes: Bytes per request; a multiple of 512. Objects longer than two requests are read by several at once.
        attempts: Requests made for one range before its error is raised.
        connect_timeout_s: Seconds to establish a connection.
        first_byte_timeout_s: Seconds from the request to the first byte of the body.
        stall_timeout_s: Seconds without a byte after which a body is aborted and the rest is requested again.
        min_rate_bytes_s: A body slower than this over 30 seconds is aborted and the rest is requested again. 0: no
            minimum.
        total_timeout_s: Seconds for one range with all its attempts.
        backoff_s: Maximum wait before the second attempt. It doubles with each attempt; the wait is drawn below it.
        backoff_cap_s: Maximum wait before any attempt, unless the store asks for a longer one (at most 60 s).
        hedge_share: Maximum share of hedged requests. A request is hedged if its first byte is later than 95 % of the
            first bytes of that host. 0: no hedging.
        gap_bytes: Concurrent ranges of one object are merged if at most this many bytes are between them. 0: only
            adjacent ranges.
        cache_dir: Folder of a read cache shared by all processes of this machine. None: no cache.
        cache_bytes: Size limit of the cache. The least recently used entries that no loader has open are removed first.
        allow_pipe: True if `pipe:` addresses may run their shell commands.
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
            raise check.invalid("range_bytes", self.range_bytes, "a multiple of 512, and above 0")
        for name in ("attempts", "cache_bytes"):
            check.number(name, getattr(self, name), 1)
        for name in ("connect_timeout_s", "first_byte_timeout_s", "stall_timeout_s", "total_timeout_s"):
            check.number(name, getattr(self, name), is_open=True)
        for name in ("backoff_s", "backoff_cap_s", "min_rate_bytes_s", "gap_bytes"):
            check.number(name, getattr(self, name))
        check.number("hedge_share", self.hedge_share, most=1)


@dataclass(frozen=True, kw_only=True)
class Exclude:
    """Samples that are never read, for data sets whose samples have numbers.

    The order of the other samples does not change, and global batches are filled up with the following samples. The
    result does not depend on the number of ranks. A state records the exclusions of its epoch. On resume these take
    precedence over the option.

    Attributes:
        samples: Numbers of samples in the data set, before any shuffle, excluded from each epoch. In interleaved or
            mixed streams the samples of the first stream have the first numbers, then those of the next. `quarantine=`
            writes these numbers too.
        steps: (first, past the last) global batches of one epoch, counted in its order from 0 as if nothing were
            excluded: `[(5000, 5010)]` are ten steps.
        epoch: Number of the epoch of `steps`.
        files: Files written by a loader's `quarantine=`. Their samples are excluded from each epoch.
    """

    samples: Sequence[int] = ()
    steps: Sequence[tuple[int, int]] = ()
    epoch: int = 0
    files: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        if not _are(self.samples, is_whole):
            raise check.invalid("Exclude: samples", self.samples, "a list of whole numbers, each 0 or more")
        if not _are(self.steps, lambda pair: _are(pair, is_whole) and len(pair) == 2 and pair[0] < pair[1]):
            raise check.invalid("Exclude: steps", self.steps, "a list of pairs: (first, past the last)")
        check.whole("Exclude: epoch", self.epoch)
        if _is_path(self.files) or not _are(self.files, _is_path):
            raise check.invalid("Exclude: files", self.files, "a list of paths")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SkipPolicy:
    """Rules for skipping failed samples.

    Attributes:
        decide: Called with the exception, returns True to skip the sample. None: all are skipped.
        in_all: Maximum number per epoch. None: no limit.
        in_a_row: Maximum number without a delivered sample in between. None: no limit.
    """

    decide: Callable[[BaseException], object] | None
    in_all: int | None
    in_a_row: int | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a loader with every "auto" resolved.

    Attributes:
        batch_size: Samples per rank. If `global_batch_size` is given, it is derived from that.
        is_single: True if samples are emitted one by one, without batching.
        tail: See `headrace.order.Steps`.
        fetch_concurrency: Maximum number of concurrent reads. The start value is `first_reads`.
        skips: None: the first error of a batch is raised in its place.
        balance: None: each rank has a contiguous part of each step.
        quarantine: Path of the file that lists skipped samples.
        together: Maximum number of single samples per task.
        unchanged: See `headrace.workers.tasks.Chain`.
    """

    batch_size: int
    global_batch_size: int | None = None
    is_single: bool = False
    tail: Tail = "short"
    drop_last: bool
    num_workers: int
    prefetch_factor: int
    collate: Callable[[list[Any]], object] | None = None
    use_slots: bool = False
    init: Callable[[int], object] | None = None
    seed: int = 0
    in_order: bool
    timeout_s: float
    fetch_concurrency: int = 1
    first_reads: int = 1
    memory_budget: int
    fetch: FetchOptions = FetchOptions()
    skips: SkipPolicy | None = None
    exclude: Exclude | None = None
    balance: Balance | None = None
    quarantine: str | None = None
    pin_memory: bool = False
    device: object = None
    together: int = 1
    unchanged: Callable[[object], bool] | None = None


def _are(values: Any, wanted: Callable[[Any], bool]) -> bool:
    """True if `values` is a collection, not an iterator, and each value satisfies `wanted`."""
    return hasattr(values, "__iter__") and hasattr(values, "__len__") and all(map(wanted, values))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


MAX_SKIPS = None, 100  # default of max_skips: in total, in a row


def skip_policy(on_error: Any, max_skips: Any) -> SkipPolicy | None:
    """Return the policy for failed samples, None for none, or raise OptionError."""
    if callable(on_error):
        check.function("on_error", on_error, is_plain=True)
    else:
        check.one_of("on_error", on_error, ("raise", "skip"), ", or a function of an exception")
    limits = max_skips if isinstance(max_skips, tuple) else (max_skips, None)
    if len(limits) != 2 or not all(limit is None or is_whole(limit) for limit in limits):
        raise check.invalid("max_skips", max_skips, "a whole number or None, or two of them: in all, in a row")
    if on_error != "raise":
        return SkipPolicy(None if on_error == "skip" else on_error, *limits)
    if max_skips != MAX_SKIPS:
        raise check.lacking(f"max_skips={max_skips!r}", "on_error='skip' or a function, and on_error is 'raise'")
    return None


def exclusion(given: Exclude | str | os.PathLike[str] | None) -> Exclude | None:
    """Return the exclusion, or raise OptionError. A path is a file written by `quarantine`."""
    if isinstance(given, str | os.PathLike):
        return Exclude(files=[given])
    if given is not None and not isinstance(given, Exclude):
        raise check.invalid("exclude", given, "hr.Exclude(samples=…, steps=…) or a file written by quarantine=")
    return given


def quarantine_file(given: str | os.PathLike[str] | None, on_error: object) -> str | None:
    """Return the path, or raise OptionError if nothing is skipped or the file is not writable."""
    if given is None:
        return None
    path = os.fspath(given)
    if on_error == "raise":
        raise check.lacking(f"quarantine={path!r}", "on_error='skip' or a function, and on_error is 'raise'")
    try:
        with open(path, "ab", opener=open_file):  # pathlib takes no opener
            return path
    except (OSError, ValueError) as error:
        raise OptionError(f"quarantine={path!r} cannot be written: {error}") from error


def open_file(path: str, flags: int) -> int:
    """Open a regular file, for `opener` of Python's `open`. Never blocks on a pipe or device.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is a pipe or a device, and no file")
    return descriptor
