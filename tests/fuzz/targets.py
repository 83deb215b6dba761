"""All targets by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from fuzz import (
    arrows,
    columns,
    decoders,
    decompression,
    delimited,
    energon,
    indexes,
    json_lines,
    litdata,
    mds,
    mp4,
    parquet,
    plain_text,
    safetensors,
    tar_reader,
    tfrecord,
    tokens,
    zips,
)


class Target(Protocol):
    """What a module here has that is a target."""

    def seeds(self) -> Iterator[bytes]:
        """Inputs to begin with; the first bytes of each choose what is done with the rest."""
        ...

    def check(self, data: bytes) -> None:
        """Any exception says that something is wrong."""
        ...


TARGETS: dict[str, Target] = {
    "tar_reader": tar_reader,
    "indexes": indexes,
    "decoders": decoders,
    "columns": columns,
    "decompression": decompression,
    "json_lines": json_lines,
    "delimited": delimited,
    "plain_text": plain_text,
    "mds": mds,
    "tokens": tokens,
    "parquet": parquet,
    "arrows": arrows,
    "litdata": litdata,
    "tfrecord": tfrecord,
    "mp4": mp4,
    "zips": zips,
    "safetensors": safetensors,
    "energon": energon,
}
