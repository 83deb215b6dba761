"""What headrace's workers do to samples: a module of its own, so that they import nothing else of the contestant."""

from __future__ import annotations

from typing import Any

import torch
from workloads import Work


class Sample:
    """What the data set gives to (tensor, label); runs in the workers."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, sample: Any) -> tuple[torch.Tensor, int]:
        if self.work.kind == "tar":
            return self.work.apply(sample[self.work.field]), int(sample["cls"])
        if self.work.kind == "local":
            return self.work.apply(sample), self.work.label(sample)
        return self.work.apply(sample[0]), sample[1]
