"""An operator as a package of somebody else would have it: each sample several times, all but the first with noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import headrace as hr


class NoisyCopies:
    def __init__(self, most: int, field: str) -> None:
        self.most, self.field = most, field

    def __call__(self, sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for copy in range(int(sample[self.field]) % (self.most + 1)):
            noise = int(hr.rng().integers(1000)) if copy else 0
            yield {**sample, "noise": noise}


def noisy_copies(most: int = 3, field: str = "n") -> hr.SampleOp:
    return hr.SampleOp(fn=NoisyCopies(most, field), yields="many")


hr.register_operator("noisy_copies", noisy_copies)
