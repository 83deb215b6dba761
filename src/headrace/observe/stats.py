"""Counters of a loader, and snapshots of them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

_SKIPPED_MOST = 100  # samples that are remembered


class Function(NamedTuple):
    """What a function of the user's has taken that runs where samples are read.

    Attributes:
        where: "loop": coroutines, which hold the event loop between two waits; "threads": what `from_map` and
            `from_iterable` call in threads of the trainer's process.
        calls: how often it was called.
        seconds: how long it has held the loop, or computed in threads, in all; estimated by some of the calls.
        waited: The seconds that its calls in threads waited for other things, such as a disk or the network.
    """

    where: Literal["loop", "threads"]
    calls: int
    seconds: float
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """Stage 2, since the loader was made.

    Attributes:
        requests, retries, errors: made, made again, failed for good.
        hedges, hedges_won: second requests made because a first byte was late; those that were answered first.
        throttled: answers by which a store asked for fewer requests.
        lowest_level: to how few requests at once that has led, or time-outs have; 0: to none.
        coalesced: reads of a range that had no request of their own.
        shards_whole, shards_in_part: shards with an index that were read like a stream, and those of which only what
            was wanted was asked for.
        cached: reads that the cache has answered.
        bytes: received.
        in_flight: requests under way now.
        active_s: seconds with at least one request under way.
        reading_s: seconds in which samples were being read, by us or by a data set's own coroutines.
        functions: the user's own that run where samples are read, by name.
        input_bytes: bytes of inputs held now, in shared memory.
        claimed_bytes: bytes beside it that samples of keys and iterators take, or are expected to take, while they are
            read; with worker processes twice as many, as they are copied once.
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
    """Stage 3, since the loader was made.

    Attributes:
        workers: processes (1 stands for the thread of `num_workers=0`).
        busy_s: seconds that workers spent in each step; "start" is loading functions with all that they import, and
            `worker_init_fn`, "read" is unpacking inputs, "write" filling slabs.
        deaths: workers that ended before their time, and were replaced.
        batches_at_once: how many batches may be under way, where their samples are made by all workers and then
            collated by one; 0 elsewhere.
        collations_at_once: how many of them may be collated at once.
        is_inline: batches are made inside `next` (torch's data sets with `num_workers=0`).
    """

    workers: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    deaths: int = 0
    batches_at_once: int = 0
    collations_at_once: int = 0
    is_inline: bool = False


@dataclass(frozen=True, kw_only=True)
class DeliverStats:
    """Stage 4, since the loader was made.

    Attributes:
        batches, samples: received by the trainer. Of torch's data sets that are iterated over a short last batch may
            count as a whole one.
        bytes: of these batches, as they came from workers that are processes; torch's data sets only.
        wait_s: seconds that the trainer waited in `next`, first batches left out.
        first_wait_s: seconds that it waited for the first batch of each epoch.
        trainer_s: seconds between one batch's arrival and the next call of `next`.
        ready: batches that are ready now.
        begun: batches that are begun and not delivered.
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
        """Seconds spent in loops over the loader, waiting or not."""
        return self.first_wait_s + self.wait_s + self.trainer_s


class SkippedSample(NamedTuple):
    """A sample that was left out because it failed.

    Attributes:
        epoch: the number of the epoch.
        position: its position in the epoch.
        name: its key, or its shard's address where it has none; empty where neither is known.
        error: the kind and the text of its exception.
    """

    epoch: int
    position: int
    name: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a loader.

    Attributes:
        epoch: the number of the epoch.
        elapsed_s: seconds since the first iteration began.
        shared_bytes: shared memory taken now, for inputs and batches; memfds do not show in /dev/shm.
        budget_bytes: the loader's limit for it.
        started_s: seconds until workers stood ready, since the first iteration began.
        skipped: samples that were left out because they failed, in all epochs.
        skipped_samples: the first 100 of them.
        repeated: samples that came again, in all epochs that are over: those that filled up last steps (tail="pad"),
            on all ranks together; and where ranks share epochs of `.epoch(samples=N)` whose samples are counted as they
            come, those that this rank received of a second or later pass over its part of the data. Of packed
            documents, documents count.
        left_out: samples of last steps that were dropped, or left to the next epoch, on all ranks together.
        unread: samples of this rank's part of the data that such epochs of N samples have not come to, before filters.
            It counts samples that have numbers; of others nobody knows how many are left.
        tokens: of a mixture by tokens, how many of each source were received in this epoch, by its name: in the rows
            of this rank; the first rank also counts those of all ranks that came before a state which was loaded.
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
        """Seconds until workers could begin with their first samples: the processes, and what is loaded in them."""
        return (self.started_s or 0.0) + self.work.busy_s.get("start", 0.0) / max(1, self.work.workers)

    @property
    def busy_share(self) -> float:
        """The share of their time that workers are busy, while a loop is running and since they have begun."""
        time_s = self.work.workers * (self.deliver.active_s - self.start_s)
        busy_s = sum(self.work.busy_s.values()) - self.work.busy_s.get("start", 0.0)
        return min(1.0, busy_s / max(1e-9, time_s))


class LoaderMeters:
    """Where all stages of a loader count; work and epochs on the engine's loop, `next` in the trainer's threads."""

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
        self._reading = set[object]()  # the epochs that read now
        self._reading_since: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The first iteration begins."""
        if self.began is None:
            self.began = time.perf_counter()

    def count_started(self) -> None:
        """The workers are there."""
        if self.started_s is None and self.began is not None:
            self.started_s = time.perf_counter() - self.began

    def count_work(self, step: str, seconds: float) -> None:
        self.busy_s[step] = self.busy_s.get(step, 0.0) + seconds

    def count_death(self) -> None:
        self.deaths += 1

    def count_skip(self, epoch: int, position: int, name: str, error: str) -> None:
        """A sample was left out."""
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
        """The trainer got a batch, for which it waited; `elsewhere_s`: what it did before, None before the first."""
        with self._lock:
            self.batches += 1
            self.samples += samples
            if elsewhere_s is None:
                self.first_wait_s += waited_s
            else:
                self.wait_s += waited_s
                self.trainer_s += elsewhere_s

    def elapsed_s(self) -> float:
        """Seconds since the first iteration began."""
        return 0.0 if self.began is None else time.perf_counter() - self.began
