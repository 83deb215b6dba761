"""Option classes of the loader."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from numpy.typing import ArrayLike

from headrace._util import check
from headrace._util.check import is_whole
from headrace.types import Ints, Tail

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Balance = Literal["tokens", "tokens^2"] | Callable[[Ints], ArrayLike]
"""Measure of work that is balanced among ranks, see `Ranks`."""

MiB, GiB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Options of reads.

    Attributes:
        concurrency: Maximum number of concurrent reads. "auto" starts with 128, and doubles the number up to 1,024 as
            long as each doubling increases the throughput by a third.
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

    concurrency: int | Literal["auto"] = "auto"
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
        if self.concurrency != "auto":
            check.whole("Fetch: concurrency", self.concurrency, 1, ", or 'auto'")
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
            mixed streams the samples of the first stream have the first numbers, then those of the next.
            `hr.Skip(log=)` writes these numbers too.
        steps: (first, past the last) global batches of one epoch, counted in its order from 0 as if nothing were
            excluded: `[(5000, 5010)]` are ten steps. Refused if operators change the number of samples.
        epoch: Number of the epoch of `steps`.
        files: Files written by `hr.Skip(log=)`. Their samples are excluded from each epoch.
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


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Rules for skipping failed samples. Not for torch's data sets.

    Attributes:
        max_in_epoch: Maximum number of samples skipped in an epoch. None: no limit. The error of the next failed sample
            is raised. Samples of one failed read count as one.
        max_in_row: Maximum number of skipped samples without a delivered sample in between. None: no limit.
        log: A file to which each skipped sample is appended, as a line of JSON with its number, name and error. Several
            processes may write to one file. `exclude=` reads it.
        when: Called with each exception, in the engine's thread. Returns True to skip the sample. None: all failed
            samples are skipped.

    Examples:
        >>> def half(n):
        ...     return n // (n % 3)
        >>> data = hr.from_map(range(1, 6)).map(half)
        >>> list(hr.DataLoader(data, batch_size=None, errors=hr.Skip(when=lambda e: isinstance(e, ZeroDivisionError))))
        [1, 1, 4, 2]
    """

    max_in_epoch: int | None = None
    max_in_row: int | None = 100
    log: str | os.PathLike[str] | None = None
    when: Callable[[BaseException], object] | None = None

    def __post_init__(self) -> None:
        check.whole_or_none("Skip: max_in_epoch", self.max_in_epoch)
        check.whole_or_none("Skip: max_in_row", self.max_in_row)
        if self.when is not None:
            check.function("Skip: when", self.when, is_plain=True)
        if self.log is not None and not _is_path(self.log):
            raise check.invalid("Skip: log", self.log, "a path")

    def check_log(self) -> None:
        """Raise OptionError if the log cannot be written."""
        try:
            if self.log is not None:
                open(self.log, "ab", opener=open_file).close()  # pathlib takes no opener
        except (OSError, ValueError) as error:
            raise check.invalid("Skip: log", str(self.log), f"a file that can be written: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Division of each global batch among the ranks of a distributed run. Not for torch's data sets.

    By default rank and world size are taken from torch.distributed or from the environment, when the loader is first
    iterated over. `hr.Ranks.none`, which is `hr.Ranks(rank=0, world_size=1)`, gives every
    rank all samples.

    Attributes:
        rank: Index of this process's part of each global batch. Needs `world_size`.
        world_size: Number of parts.
        mesh: A DeviceMesh from which both are taken. Only its dimensions that divide data count.
        dims: Names of these dimensions. None: those with usual names, such as "dp_shard".
        global_batch_size: Samples per batch over all ranks, instead of `batch_size`. Ranks differ by at most one
            sample.
        last_batch: How a short last global batch is handled. "short" emits it, and every sample comes once; if some
            ranks would have no sample, the last two global batches share the remaining samples. "drop" drops it, as
            `drop_last` does. "pad" fills it with samples from the start of the epoch, which come twice. "carry" moves
            it to the start of the next epoch. "uneven" lets each rank end with its own data: every sample comes once,
            after filters too, and ranks may make different numbers of steps. None: "short", or "drop" with `drop_last`.
        balance: Assign the samples of each global batch to ranks so that their work is even: "tokens", "tokens^2" (the
            cost of attention within documents), or a function that maps an array of sample numbers to an array of work.
            The number of samples per rank and the content of global batches do not change. "tokens" and "tokens^2" are
            for `.pack()` and token files with documents.
        compare: True: ranks compare their plans at the start of an epoch. False: they do not, for loops that not all
            ranks run.

    Examples:
        >>> second = hr.Ranks(rank=1, world_size=2, global_batch_size=4)
        >>> list(hr.DataLoader(hr.from_map(range(8)), collate_fn=list, ranks=second))
        [[2, 3], [6, 7]]
    """

    none: ClassVar[Ranks]

    rank: int | None = None
    world_size: int | None = None
    mesh: DeviceMesh | None = None
    dims: Sequence[str] | None = None
    global_batch_size: int | None = None
    last_batch: Tail | None = None
    balance: Balance | None = None
    compare: bool = True

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            given = f"Ranks: rank={self.rank!r}, world_size={self.world_size!r}: each of them"
            raise check.lacking(given, "the other: give both or none")
        if self.rank is not None and self.world_size is not None:
            rank, world = check.whole("Ranks: rank", self.rank), check.whole("Ranks: world_size", self.world_size, 1)
            if rank >= world:
                raise check.invalid("Ranks: rank", rank, f"less than world_size={world}")
        if self.dims is not None and self.mesh is None:
            raise check.lacking(f"Ranks: dims={self.dims!r}", "mesh=, the mesh with these dimensions")
        check.whole_or_none("Ranks: global_batch_size", self.global_batch_size, 1)
        check.one_of("Ranks: last_batch", self.last_batch, (None, *get_args(Tail)))
        if self.balance not in (None, "tokens", "tokens^2") and not callable(self.balance):
            raise check.invalid("Ranks: balance", self.balance, "'tokens', 'tokens^2' or a function of sample numbers")
        check.one_of("Ranks: compare", self.compare, (True, False))


Ranks.none = Ranks(rank=0, world_size=1)


@dataclass(frozen=True, kw_only=True)
class Economic:
    """Options of the economic mode.

    Attributes:
        num_batch_workers: Maximum number of batches collated at once. None: `prefetch_factor`.

    Examples:
        >>> loader = hr.DataLoader([1, 2], num_workers=1, economic=hr.Economic(num_batch_workers=1))
        >>> loader.options["num_batch_workers"]
        1
    """

    num_batch_workers: int | None = None

    def __post_init__(self) -> None:
        check.whole_or_none("Economic: num_batch_workers", self.num_batch_workers, 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a loader with every "auto" resolved.

    Attributes:
        batch_size: Samples per rank. If `global_batch_size` is given, it is derived from that.
        is_single: True if samples are emitted one by one, without batching.
        tail: See `headrace.order.steps.Steps`.
        fetch_concurrency: Maximum number of concurrent reads. The start value is `first_reads`.
        skips: None: the first error of a batch is raised in its place.
        balance: None: each rank has a contiguous part of each step.
        ranks: The option as given, with `last_batch` resolved.
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
    fetch: Fetch = Fetch()
    skips: Skip | None = None
    exclude: Exclude | None = None
    balance: Balance | None = None
    ranks: Ranks = Ranks()
    pin_memory: bool = False
    device: object = None
    together: int = 1
    unchanged: Callable[[object], bool] | None = None


def _are(values: Any, wanted: Callable[[Any], bool]) -> bool:
    """True if `values` is a collection, not an iterator, and each value satisfies `wanted`."""
    return hasattr(values, "__iter__") and hasattr(values, "__len__") and all(map(wanted, values))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


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
