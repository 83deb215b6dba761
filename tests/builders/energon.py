"""Folders as Megatron-Energon prepares them, made here from the layout."""

import io
import json
import struct
import tarfile
from collections.abc import Mapping, Sequence

from builders.tars import Fields, tar

SPLIT = ".nv-meta/split.yaml"
INFO = ".nv-meta/.info.json"


def offsets(archive: bytes) -> list[int]:
    found, key = [], None
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for member in opened:
            if member.name.partition(".")[0] != key:
                found.append(member.offset)
                key = member.name.partition(".")[0]
        return [*found, opened.offset]


def index(archive: bytes) -> bytes:
    places = offsets(archive)
    return struct.pack(f"<{len(places)}Q", *places)


def folder(
    splits: Mapping[str, Sequence[Sequence[tuple[str, Fields]]]], *, exclude: Sequence[str] = ()
) -> dict[str, bytes]:
    shards: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    for split, archives in splits.items():
        parts[split] = []
        for samples in archives:
            name = f"shard_{len(shards):03}.tar"
            shards[name], counts[name] = tar(samples), len(samples)
            parts[split].append(name)
    return {
        **shards,
        **{f"{name}.idx": index(archive) for name, archive in shards.items()},
        INFO: json.dumps({"energon_version": "7.4.1", "shard_counts": counts}).encode(),
        SPLIT: json.dumps({"split_parts": parts, "exclude": list(exclude)}).encode(),  # JSON is YAML
    }
