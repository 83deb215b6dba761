"""The loaders that are measured beside each other, a module each.

A contestant offers `VARIANTS` (name to parameters), `WORKLOADS` (the workloads it can do, and the variants that are run
by default), `PACKAGES` (whose versions to record) and `run(work, parameters)`, which gives the epoch's batches as pairs
of a stacked tensor and int64 labels, in any order, every sample once. What it imports at the module's top, and a
`prepare(work, parameters)` where it has one, is not timed; everything in `run` is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from workloads import Work

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
NAMES = ("limit", "headrace", "torch_async", "torch_threads", "torch_dl", "spdl", "wds")


class Contestant(Protocol):
    """What a contestant's module offers."""

    VARIANTS: Mapping[str, Mapping[str, Any]]
    WORKLOADS: Mapping[str, list[str]]
    PACKAGES: list[str]

    def run(self, work: Work, parameters: Mapping[str, Any]) -> Batches:
        """The batches of one epoch."""
        ...


def load(name: str) -> Contestant:
    """The module of the contestant `name`; `limit` is what none of them can pass."""
    module: object = importlib.import_module("limits" if name == "limit" else f"contestants.{name}")
    return cast("Contestant", module)


def prepare(contestant: Contestant, work: Work, parameters: Mapping[str, Any]) -> None:
    """What the contestant wants done before the clock starts."""
    if step := getattr(contestant, "prepare", None):
        step(work, parameters)
