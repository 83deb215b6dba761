"""The interface between sources and scheduler: a producer pushes samples into a flow."""

from __future__ import annotations

from typing import Any, Protocol

from headrace._util.sample_ranges import Rows
from headrace._util.shared_memory import Claim, Lease
from headrace.workers.sample_chunks import Part


class Flow(Protocol):
    """Sink for the samples of a source, with admission of reads by memory.

    Attributes:
        key: Seed of the samples' random numbers, combined with their positions.
    """

    key: int

    @property
    def is_starved(self) -> bool:
        """True if a worker is idle."""
        ...

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        """Wait until the memory budget admits `size` bytes, and lease them.

        Waiting reads are admitted in ascending order of rank. The first one is admitted over the budget if the oldest
        batch lacks samples and no other read is under way. The reservation ends with `scan` and a release, or with
        `drop`.
        """
        ...

    def drop(self, lease: Lease) -> None:
        """Return a lease that nothing was read into."""
        ...

    def loaded(self, lease: Lease) -> None:
        """Report that the bytes of a lease have arrived and are not scanned."""
        ...

    def go_on(self, worker: object) -> None:
        """Report that `worker` needs no more memory: no read is admitted over the budget meanwhile."""
        ...

    def pause(self, worker: object) -> None:
        """Report that `worker` waits for memory or for a read, or that it has ended."""
        ...

    async def turn(self, size: int, position: int) -> Claim:
        """Wait until about `size` bytes may be read for samples from `position` on, and claim them.

        The claim ends with `part_of`.
        """
        ...

    async def enlarge(self, claim: Claim, size: int, position: int) -> None:
        """Wait until a claim for samples from `position` on may grow by `size` bytes."""
        ...

    def trim(self, lease: Lease, size: int) -> None:
        """Shrink a lease to its first `size` bytes."""
        ...

    def cut(self, count: int) -> None:
        """Announce that the next batch has `count` samples, if the source determines batch sizes."""
        ...

    def put(self, start: int, part: Part) -> None:
        """Push the samples at positions from `start` on. Takes over their leases."""
        ...

    def batch_end(self, position: int) -> int | None:
        """Return the end of the samples that are useless once the one at `position` has failed.

        Failures may take the places of samples that are not read any more. None: a failure does not end its batch.
        """
        ...

    def come_again(self, count: int) -> None:
        """Declare that `count` samples have been pushed, and that they repeat without end."""
        ...

    def begin_again(self) -> None:
        """Declare that all samples pushed from now on belong to a later pass over the data."""
        ...

    def part_of(self, samples: list[Any], claim: Claim | None) -> Part:
        """Wrap Python objects read under `claim` as a part for workers. None: the claim stays open."""
        ...

    async def scan(self, scanner: Any, lease: Lease, offset: int, last: bool, order: int) -> tuple[Rows, Any]:
        """Let a worker find the samples in a fetched range: (rows, updated scanner)."""
        ...


class Producer(Protocol):
    """Source of the samples of an epoch."""

    async def run(self, flow: Flow) -> None:
        """Push all samples and return. Any order is allowed if positions are known beforehand."""
        ...

    def mark(self, position: int) -> object:
        """Return the resume mark for samples from `position` on. None if the position suffices.

        Earlier marks are not requested later.
        """
        ...
