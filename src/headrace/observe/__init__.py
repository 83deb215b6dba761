"""Counters of a loader, and the analysis of its bottleneck."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

_SKIPPED_MOST = 100  # skipped samples that are recorded


class Function(NamedTuple):
    """Time taken by a function of the user that runs while samples are read.

    Attributes:
        where: "loop": a coroutine, which holds the event loop between two waits. "threads": called by `from_map` or
            `from_iterable` in threads of the trainer's process.
        calls: Number of calls.
        seconds: Total time of holding the loop or computing in threads, extrapolated from some calls.
        waited: Seconds in which calls in threads waited, for a disk or the network.
    """

    where: Literal["loop", "threads"]
    calls: int
    seconds: float
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """Stage 2, since the loader was created.

    Attributes:
        requests, retries, errors: Requests sent, repeated, and reads that failed after all attempts.
        hedges, hedges_won: Second requests for a late first byte, and those that answered first.
        throttled: Answers by which a store demanded fewer requests.
        lowest_level: Lowest concurrency limit after these or timeouts. 0: never limited.
        coalesced: Reads answered by another read's request.
        shards_whole, shards_in_part: Indexed shards read completely, or only the needed ranges.
        cached: Reads answered by the cache.
        bytes: Bytes received.
        in_flight: Requests running now.
        active_s: Seconds with at least one request running.
        reading_s: Seconds in which samples were read, by headrace or by a data set's own coroutines.
        functions: Functions of the user that run while samples are read, by name.
        input_bytes: Shared memory of inputs now.
        claimed_bytes: Other memory that samples of keys and iterators take, or are expected to take, while they are
            read. With worker processes twice the size, as samples are copied once.
    """

    requests: int = 0
    retries: int = 0
    errors: int = 0
    hedges: int = 0
    hedges_won: int = 0
    throttled: int = 0
    lowest_level: int = 0
    coalesced: int = 0
    shards_whole: int = 0
    shards_in_part: int = 0
    cached: int = 0
    bytes: int = 0
    in_flight: int = 0
    active_s: float = 0.0
    reading_s: float = 0.0
    functions: dict[str, Function] = field(default_factory=dict)
    input_bytes: int = 0
    claimed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkStats:
    """Stage 3, since the loader was created.

    Attributes:
        workers: Number of processes. 1 also stands for the thread of `num_workers=0`.
        busy_s: Seconds that workers spent in each step. "start" is loading functions with their imports, and
            `worker_init_fn`. "read" is unpacking inputs, "write" filling slabs.
        deaths: Workers that died and were replaced.
        batches_at_once: Maximum number of open batches, if all workers make their samples and one then collates them;
            else 0.
        collations_at_once: Maximum number of concurrent collations.
        is_inline: Batches are made inside `next` (torch's data sets with `num_workers=0`).
    """

    workers: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    deaths: int = 0
    batches_at_once: int = 0
    collations_at_once: int = 0
    is_inline: bool = False


@dataclass(frozen=True, kw_only=True)
class DeliverStats:
    """Stage 4, since the loader was created.

    Attributes:
        batches, samples: Received by the trainer. With torch's iterable data sets, a short last batch may count as a
            full one.
        bytes: Bytes of these batches from worker processes; only for torch's data sets.
        wait_s: Seconds that the trainer waited in `next`, without first batches.
        first_wait_s: Seconds that it waited for the first batch of each epoch.
        trainer_s: Seconds between a batch's arrival and the next call of `next`.
        ready: Batches that are ready now.
        begun: Batches that are started and not delivered.
    """

    batches: int = 0
    samples: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    trainer_s: float = 0.0
    ready: int = 0
    begun: int = 0

    @property
    def active_s(self) -> float:
        """Seconds spent in loops over the loader, with waiting."""
        return self.first_wait_s + self.wait_s + self.trainer_s


class SkippedSample(NamedTuple):
    """A sample that was skipped because it failed.

    Attributes:
        epoch: Number of the epoch.
        position: Its position in the epoch.
        name: Its key, or else its shard's address; empty if neither is known.
        error: Type and text of its exception.
    """

    epoch: int
    position: int
    name: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a loader.

    Attributes:
        epoch: Number of the epoch.
        elapsed_s: Seconds since the first iteration began.
        shared_bytes: Shared memory in use, for inputs and batches. It is in memfds, which /dev/shm does not show.
        budget_bytes: The loader's limit for it.
        started_s: Seconds from the start of the first iteration until workers were ready.
        skipped: Samples skipped because they failed, in all epochs.
        skipped_samples: The first 100 of them.
        repeated: Samples that were repeated in all finished epochs: those that filled last batches
            (`last_batch="pad"`), on all ranks together. If ranks share epochs of `.epoch(samples=N)` with samples
            counted on arrival, also those that this rank received in a second or later pass over its part of the data.
            For packed documents, documents count.
        left_out: Samples of last steps that were dropped or left to the next epoch, on all ranks together.
        unread: Samples of this rank's part of the data that such epochs of N samples did not reach, before filters.
            Only samples with numbers are counted; of others the rest is unknown.
        tokens: For a mixture by tokens: tokens of each source received in this epoch, by name, in the rows of this
            rank. The first rank also counts those of all ranks before a loaded state.
    """

    epoch: int
    elapsed_s: float
    fetch: FetchStats
    work: WorkStats
    deliver: DeliverStats
    shared_bytes: int
    budget_bytes: int
    started_s: float | None
    skipped: int = 0
    skipped_samples: tuple[SkippedSample, ...] = ()
    repeated: int = 0
    left_out: int = 0
    unread: int = 0
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def start_s(self) -> float:
        """Seconds until workers could start their first samples: process start and imports."""
        return (self.started_s or 0.0) + self.work.busy_s.get("start", 0.0) / max(1, self.work.workers)

    @property
    def busy_share(self) -> float:
        """Share of the time that workers are busy, while a loop is running and after their start."""
        time_s = self.work.workers * (self.deliver.active_s - self.start_s)
        busy_s = sum(self.work.busy_s.values()) - self.work.busy_s.get("start", 0.0)
        return min(1.0, busy_s / max(1e-9, time_s))


class LoaderMeters:
    """Counters of all stages, written on the engine's loop; `next` counts in trainer threads."""

    def __init__(self) -> None:
        self.busy_s: dict[str, float] = {}
        self.deaths = 0
        self.batches_at_once = self.collations_at_once = 0
        self.ready = self.begun = 0
        self.samples = 0
        self.batches = 0
        self.wait_s = self.first_wait_s = self.trainer_s = 0.0
        self.began: float | None = None
        self.started_s: float | None = None
        self.reading_s = 0.0
        self.skipped = 0
        self.skipped_samples: list[SkippedSample] = []
        self.repeated = self.left_out = self.unread = 0
        self._reading = set[object]()  # epochs that are reading now
        self._reading_since: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        if self.began is None:
            self.began = time.perf_counter()

    def count_started(self) -> None:
        if self.started_s is None and self.began is not None:
            self.started_s = time.perf_counter() - self.began

    def count_work(self, step: str, seconds: float) -> None:
        self.busy_s[step] = self.busy_s.get(step, 0.0) + seconds

    def count_death(self) -> None:
        self.deaths += 1

    def count_skip(self, epoch: int, position: int, name: str, error: str) -> None:
        self.skipped += 1
        if len(self.skipped_samples) < _SKIPPED_MOST:
            self.skipped_samples.append(SkippedSample(epoch, position, name, error))

    def set_reading(self, epoch: object, is_reading: bool) -> None:
        (self._reading.add if is_reading else self._reading.discard)(epoch)
        if bool(self._reading) != (self._reading_since is not None):
            now = time.perf_counter()
            if self._reading_since is not None:
                self.reading_s += now - self._reading_since
            self._reading_since = now if self._reading else None

    def set_depths(self, *, ready: int, open_batches: int) -> None:
        self.ready, self.begun = ready, open_batches

    def count_next(self, samples: int, waited_s: float, elsewhere_s: float | None) -> None:
        """Count a received batch. `elsewhere_s`: trainer time before it; None for a first batch."""
        with self._lock:
            self.batches += 1
            self.samples += samples
            if elsewhere_s is None:
                self.first_wait_s += waited_s
            else:
                self.wait_s += waited_s
                self.trainer_s += elsewhere_s

    def elapsed_s(self) -> float:
        return 0.0 if self.began is None else time.perf_counter() - self.began


class Reports:
    """Base of classes that report their counters."""

    def stats(self) -> Stats:
        """Return a snapshot of the counters, by stage."""
        raise NotImplementedError

    def report(self) -> str:
        """Return a table of the counters, with one sentence on the bottleneck and advice."""
        from headrace.observe.report import report

        return report(self.stats())

    def bound_by(self) -> str:
        """Return the bottleneck in one word.

        "trainer", "fetch", "loop" (your own code on the event loop, or in the threads of `from_map` and
        `from_iterable`), "work", "collate", or "unknown" (too few batches, or no clear bottleneck).
        """
        from headrace.observe.report import verdict

        return verdict(self.stats()).bound_by
