"""The seam between what gives samples and what makes batches of them: a producer, and the flow that it is given."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.memory import Claim, Lease
from headrace.parts import Part
from headrace.rows import Rows


class Flow(Protocol):
    """What a source is given: the right to read ahead, and somewhere to put what it has read.

    Attributes:
        key: from which, with their positions, the samples' random numbers are made.
    """

    key: int

    @property
    def is_starved(self) -> bool:
        """Whether a worker has nothing to do."""
        ...

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        """Wait until `size` more bytes may be held, and get memory for them.

        Those who wait are let in by rank, the lowest first; and the first of them even over the budget, where the
        oldest batch lacks samples and nothing is on its way to it. It ends with `scan` and a release, or with `drop`.
        """
        ...

    def drop(self, lease: Lease) -> None:
        """Give back a lease that nothing was read into."""
        ...

    def loaded(self, lease: Lease) -> None:
        """Say that the bytes of a lease have come, where nobody scans them: others may need room to go on with them."""
        ...

    def go_on(self, worker: object) -> None:
        """Say that something gets on without more memory, so that nobody is let in over the budget meanwhile."""
        ...

    def pause(self, worker: object) -> None:
        """Say that it waits, for memory or for what is being read; or that it has ended."""
        ...

    async def turn(self, size: int, position: int) -> Claim:
        """Wait until about `size` more bytes may be read for the samples from `position` on, and claim them.

        It ends with `part_of`.
        """
        ...

    async def enlarge(self, claim: Claim, size: int, position: int) -> None:
        """Wait until a claim, for the samples from `position` on, may be `size` bytes larger."""
        ...

    def trim(self, lease: Lease, size: int) -> None:
        """Keep only the first bytes of a lease."""
        ...

    def cut(self, count: int) -> None:
        """Say that the next batch has `count` samples, where batches are as long as the source says."""
        ...

    def put(self, start: int, part: Part) -> None:
        """Hand over the samples at the positions from `start` on, with their leases."""
        ...

    def batch_end(self, position: int) -> int | None:
        """Where the samples end that are of no use once the one at `position` has failed: with it, or with its batch.

        Failures may be put in the places of those that are not got any more. None: its batch does not end with it.
        """
        ...

    def come_again(self, count: int) -> None:
        """Say that so many samples have been put, and that they come again and again, without end."""
        ...

    def begin_again(self) -> None:
        """Say that all that is put from now on is of a later pass over the data than the first."""
        ...

    def part_of(self, samples: list[Any], claim: Claim | None) -> Part:
        """Python objects, read by that claim, as a part that workers can be given; None: the claim goes on."""
        ...

    async def scan(self, scanner: Any, lease: Lease, offset: int, last: bool, order: int) -> tuple[Rows, Any]:
        """Have a worker find the samples in a fetched range; gives their rows and the scanner as it stands after it."""
        ...


class Producer(Protocol):
    """Gives an epoch's samples to a flow: plan and fetch behind one face."""

    async def run(self, flow: Flow) -> None:
        """Put every sample, in any order where positions are known beforehand, and return."""
        ...

    def mark(self, position: int) -> object:
        """Where to begin again for the samples from `position` on; None where positions themselves tell that.

        Marks before it are not asked for again.
        """
        ...
