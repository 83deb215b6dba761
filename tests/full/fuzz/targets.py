"""All targets by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

NAMES = (
    "tar_reader",
    "indexes",
    "decoders",
    "columns",
    "decompression",
    "json_lines",
    "delimited",
    "plain_text",
    "mds",
    "tokens",
    "parquet",
    "arrows",
    "litdata",
    "tfrecord",
    "mp4",
    "zips",
    "safetensors",
    "energon",
)
"""The modules here that are targets."""


class Target(Protocol):
    """A target module."""

    def seeds(self) -> Iterator[bytes]:
        """Inputs to begin with; the first bytes of each choose what is done with the rest."""
        ...

    def check(self, data: bytes) -> None: ...


def target(name: str) -> Target:
    return cast("Target", importlib.import_module(f"full.fuzz.{name}"))
