"""Estimated and claimed bytes of samples before they are read."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from headrace._util.shared_memory import Claim
from headrace.workers.sample_chunks import PackedPart, Part

if TYPE_CHECKING:
    from headrace.readers.protocol import Flow

_EXPECTED_BYTES = 65536  # of a sample, before the first


class Expectation:
    """Mean size of the samples so far."""

    def __init__(self) -> None:
        self._samples, self._nbytes = 1, _EXPECTED_BYTES

    def of(self, count: int) -> int:
        return count * self._nbytes // self._samples

    def learn(self, part: Part, charged: int) -> None:
        """Add samples. Their size is that of their part, or the bytes charged during the read."""
        nbytes = part.lease.size if isinstance(part, PackedPart) else max(charged, getattr(part, "nbytes", 0))
        if nbytes:
            if self._samples == 1:
                self._nbytes = 0
            self._samples += part.count
            self._nbytes += nbytes


class Charge:
    """The claim of a chunk's samples: the estimated bytes, or more once reads report sizes."""

    def __init__(self, flow: Flow, claim: Claim, expected: int, position: int) -> None:
        self._flow, self.claim, self._granted, self._position = flow, claim, expected, position
        self.charged = 0

    def __call__(self, nbytes: int) -> Awaitable[None] | None:
        self.charged += nbytes
        missing = self.charged - self._granted
        # Reads that continue after the sample was emitted are not charged.
        if missing <= 0 or not self.claim.holders:
            return None
        self._granted = self.charged  # set now, so that no other call requests these bytes
        return self._enlarge(missing)

    async def _enlarge(self, missing: int) -> None:
        try:
            await self._flow.enlarge(self.claim, missing, self._position)
        except BaseException:
            self._granted -= missing
            raise
