"""Indexes of shards in a form that compares."""

from typing import Any

from headrace.formats.index.shard import ShardIndex


def listed(index: ShardIndex) -> tuple[Any, ...]:
    rows, frames = index.rows, index.frames
    return (
        rows.keys.tolist(),
        rows.starts.tolist(),
        [rows.fields[number] for number in rows.field.tolist()],
        rows.offset.tolist(),
        rows.size.tolist(),
        rows.fields,
        None if index.crc is None else index.crc.tolist(),
        index.size,
        index.etag,
        None if frames is None else (frames.packed.tolist(), frames.unpacked.tolist()),
    )
