"""How many bytes samples are taken to have before they have been got, and what is claimed for them."""

from __future__ import annotations

from collections.abc import Awaitable

from headrace.memory import Claim
from headrace.parts import PackedPart, Part
from headrace.producer import Flow

_EXPECTED_BYTES = 65536  # of a sample, before any has been seen


class Expectation:
    """The mean size of samples so far."""

    def __init__(self) -> None:
        self._samples, self._nbytes = 1, _EXPECTED_BYTES

    def of(self, count: int) -> int:
        return count * self._nbytes // self._samples

    def learn(self, part: Part, charged: int) -> None:
        """Samples take as many bytes as their part has, or as were charged while they were read."""
        nbytes = part.lease.size if isinstance(part, PackedPart) else max(charged, getattr(part, "nbytes", 0))
        if nbytes:
            if self._samples == 1:
                self._nbytes = 0
            self._samples += part.count
            self._nbytes += nbytes


class Charge:
    """What the samples of a chunk may hold: as much as was expected of them, and more once reads tell their sizes."""

    def __init__(self, flow: Flow, claim: Claim, expected: int, position: int) -> None:
        self._flow, self.claim, self._granted, self._position = flow, claim, expected, position
        self.charged = 0

    def __call__(self, nbytes: int) -> Awaitable[None] | None:
        self.charged += nbytes
        missing = self.charged - self._granted
        # What goes on after its sample was given, or was begun by it, reads without us.
        if missing <= 0 or not self.claim.holders:
            return None
        self._granted = self.charged  # asked for now, so that nobody asks for it again
        return self._enlarge(missing)

    async def _enlarge(self, missing: int) -> None:
        try:
            await self._flow.enlarge(self.claim, missing, self._position)
        except BaseException:
            self._granted -= missing
            raise
